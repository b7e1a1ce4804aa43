"""Codecs by themselves and in messages: how close rows come back, and in how many bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import outergrad as og
from outergrad.core.coding import encode, nbytes, received, tensors
from outergrad.messages.header import DTYPES
from outergrad.messages.layout import Layout
from outergrad.messages.wire import Piece
from outergrad.wire import BF16, Int8, TopK

CODECS: dict[str, tuple[Any, ...]] = {
    "bf16": (BF16(),),
    "int8": (Int8(),),
    "topk": (TopK(0.1),),
    "all of them": (TopK(1.0),),
    "topk, bf16": (TopK(0.3), BF16()),
    "topk, int8": (TopK(0.1), Int8()),
}
shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 70))
scales = st.sampled_from([1e-30, 1e-3, 1.0, 1e20])
by_codecs = pytest.mark.parametrize("codecs", CODECS.values(), ids=CODECS)


def rows(shape: tuple[int, ...], scale: float = 1.0, seed: int = 0) -> Tensor:
    """Rows of different sizes, with zeros and ties, a row of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    found = scale * torch.randn(shape, generator=generator)
    found *= 10.0 ** torch.randint(-3, 3, (*shape[:-1], 1), generator=generator)
    found[found.abs() < 0.3 * scale] = 0.0
    found[0, 0] = 0.0
    return found


def picked(fraction: float, width: int) -> int:
    return max(1, round(fraction * width))


BOUNDS = {
    BF16: lambda x: 2.0**-8 * x.abs(),
    Int8: lambda x: 0.5001 * x.abs().amax(dim=-1, keepdim=True) / 127,
}
"""Of the error; that of TopK is in the test."""


def largest(x: Tensor, fraction: float) -> Tensor:
    """Magnitude of the smallest entry of each row that is among its largest ones."""
    return x.abs().sort(dim=-1, descending=True).values[..., [picked(fraction, x.shape[-1]) - 1]]


@by_codecs
@given(shape=shapes, scale=scales, seed=st.integers(0, 99))
def test_rows_come_back_within_the_bound(codecs, shape, scale, seed):
    x = rows(shape, scale, seed)
    found, error = received(codecs, x), torch.zeros_like(x)
    for codec in codecs:
        if isinstance(codec, TopK):
            limit = largest(x, codec.fraction)
            assert (found != 0).sum(dim=-1).max() <= picked(codec.fraction, shape[-1])
            error = torch.where(x.abs() > limit, 0.0, x.abs())
        else:
            error = error + BOUNDS[type(codec)](x)
    assert found.dtype == torch.float32
    assert ((found - x).abs() <= error).all()


@given(shape=shapes, fraction=st.floats(0.01, 1.0), seed=st.integers(0, 99))
def test_topk_keeps_the_largest_to_the_bit(shape, fraction, seed):
    x = rows(shape, seed=seed)
    found = received((TopK(fraction),), x)
    kept = found != 0
    assert found[kept].equal(x[kept])
    whole = x.abs().sort(dim=-1, descending=True).values[..., : picked(fraction, shape[-1])]
    assert found.abs().sum(dim=-1).allclose(whole.sum(dim=-1))


@pytest.mark.parametrize("dtype", DTYPES)
@by_codecs
@given(shape=shapes, seed=st.integers(0, 9))
def test_what_is_written_follows_from_the_shape(codecs, dtype, shape, seed):
    """Not from the numbers: sites agree on lengths before they have them."""
    agreed = tensors(codecs, shape, dtype)
    assert sum(math.prod(s) * d.itemsize for s, d in agreed) == nbytes(codecs, shape, dtype)
    for x in (rows(shape, seed=seed), torch.zeros(shape), torch.full(shape, math.nan)):
        written = encode(codecs, x.to(dtype))
        assert [tuple(t.shape) for t in written] == [s for s, _ in agreed]


ROW_BYTES = {
    "bf16": 2 * 1000,
    "int8": 1000 + 4,
    "topk": 100 * (4 + 2),
    "all of them": 1000 * (4 + 2),
    "topk, bf16": 300 * (2 + 2),
    "topk, int8": 100 * (1 + 2) + 4,
}


@pytest.mark.parametrize(("label", "per_row"), ROW_BYTES.items(), ids=ROW_BYTES)
def test_bytes_of_a_row_of_a_thousand(label, per_row):
    assert nbytes(CODECS[label], (2, 3, 1000)) == 6 * per_row


@pytest.mark.parametrize(("width", "dtype"), [(32768, torch.int16), (32769, torch.int32)])
def test_places_in_long_rows_take_more(width, dtype):
    codecs, x = (TopK(1e-4),), torch.zeros(1, 1, width)
    x[..., -1] = 3.0
    assert tensors(codecs, (1, 1, width), torch.float32)[1].dtype == dtype
    assert received(codecs, x).equal(x)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@by_codecs
def test_what_is_not_finite_is_seen_in_its_row(codecs, value):
    x = rows((2, 3, 40))
    spoilt = x.clone()
    spoilt[1, 2, 7] = value
    found, expected = received(codecs, spoilt), received(codecs, x)
    assert not found[1, 2].isfinite().all()
    found[1, 2] = expected[1, 2]
    assert found.equal(expected)


def test_a_row_of_int8_with_an_infinity_is_nothing_but_nan():
    assert received((Int8(),), torch.tensor([[[1.0, math.inf, 0.0]]])).isnan().all()


@given(st.integers(-149, 127))
def test_int8_knows_no_smallest_row(exponent):
    """Nor a largest: down to subnormal numbers, which it may only lose."""
    x = torch.tensor([[[1.0, -0.5, 0.25, 0.0]]]) * 2.0**exponent
    assert (received((Int8(),), x) - x).abs().max() <= max(2.0**exponent / 254, 2.0**-126)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lookup", [True, False])
@by_codecs
def test_messages_hold_encoded_rows_apart(codecs, lookup, dtype):
    """Ids and bias gradients come back as they were; rows that are not there are zeros."""
    slot = og.Slot("l", "l.w", 35, 47, bias="l.b", groups=1 if lookup else 3, lookup=lookup)
    piece = Piece(slot, 9, dtype, None if lookup else torch.float32, codecs)
    layout = Layout(64, {}, [piece, Piece(slot, 0, dtype, None, codecs), piece])
    assert layout.nbytes == 64 + 2 * piece.nbytes
    message = torch.zeros(layout.nbytes, dtype=torch.uint8)
    sent = [factors(slot, count, dtype) for count in (9, 6)]
    first, none, second = layout.views(message)
    assert none is None
    for filled, given_rows in zip((first, second), sent, strict=True):
        filled.fill(given_rows)
    found = [part for part in layout.gradients(message) if part is not None]
    for part, (d_GRO, a_GRI, b_GO) in zip(found, sent, strict=True):
        count = d_GRO.shape[1]
        assert part.d_GRO[:, :count].equal(received(codecs, d_GRO))
        assert not part.d_GRO[:, count:].any()
        if lookup:
            assert part.a_GRI[:count].equal(a_GRI)
        else:
            assert part.a_GRI[:, :count].equal(received(codecs, a_GRI))
            assert part.b_GO.equal(b_GO)
    assert not message[:64].any()


def factors(slot: og.Slot, count: int, dtype: torch.dtype) -> og.Factors:
    d_GRO = rows((slot.groups, count, slot.outputs), seed=count).to(dtype)
    if slot.lookup:
        return og.Factors(d_GRO, torch.arange(count))
    a_GRI = rows((slot.groups, count, slot.inputs), seed=count + 1).to(dtype)
    return og.Factors(d_GRO, a_GRI, torch.randn(slot.groups, slot.outputs))


# -- settings -------------------------------------------------------------------------------------

METHODS = (og.DAD, og.RankDAD, og.PowerSGD, og.Sparse)
MISTAKES = {
    "a string": ("bf16", "use codecs of og.wire, as og.wire.BF16"),
    "a dtype": (torch.bfloat16, "use codecs of og.wire, as og.wire.BF16"),
    "a class": (Int8, "use codecs of og.wire, as og.wire.BF16"),
    "one of two": ((TopK(0.1), "int8"), "use codecs of og.wire, as og.wire.BF16"),
    "order": ((Int8(), TopK(0.1)), "TopK picks values as they are: put it before Int8"),
    "two dtypes": ((BF16(), Int8()), "BF16 and Int8 each write values in a dtype"),
    "twice": ((TopK(0.1), TopK(0.5)), "TopK and TopK both pick values: use one of them"),
    "three": ((TopK(0.1), Int8(), BF16()), "Int8 and BF16 each write values in a dtype"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("wire", "said"), MISTAKES.values(), ids=MISTAKES)
def test_what_cannot_stand_there_is_named(method, wire, said):
    with pytest.raises(ValueError, match=rf"^{method.__name__}: wire=.*{said}"):
        method(wire=wire)


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1, math.nan])
def test_a_wrong_fraction_is_named(fraction):
    with pytest.raises(ValueError, match="TopK: fraction="):
        TopK(fraction)


@by_codecs
def test_sums_are_rounded_at_most(codecs):
    if codecs == (BF16(),):
        assert og.PowerSGD(wire=codecs).wire == codecs
        assert og.RankDAD(wire=codecs, reduce="all_reduce").wire == codecs
        assert og.Sparse(wire=codecs, select="random").wire == codecs
        return
    with pytest.raises(ValueError, match=r"PowerSGD: wire=.*BF16\(\) at most"):
        og.PowerSGD(wire=codecs)
    with pytest.raises(ValueError, match=r"RankDAD: wire=.*BF16\(\) at most.*adds up"):
        og.RankDAD(wire=codecs, reduce="all_reduce")
    with pytest.raises(ValueError, match="Sparse: wire="):
        og.Sparse(wire=codecs, select="random")


def test_a_codec_is_a_sequence_of_one():
    """A method is the same, and reads the same, however its codecs were passed."""
    assert og.DAD(wire=Int8()) == og.DAD(wire=[Int8()]) == og.DAD(wire=(Int8(),))
    assert hash(og.DAD(wire=[TopK(0.1)])) == hash(og.DAD(wire=TopK(fraction=0.1)))
    assert "wire=(TopK(fraction=0.1), Int8())" in repr(og.RankDAD(wire=[TopK(0.1), Int8()]))
    assert og.RankDAD().wire == og.DAD().wire == ()
