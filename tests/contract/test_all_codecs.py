"""What every codec must do, those of the library and one of another's own, and two in a row.

A codec of your own goes into `CODECS`, and what it may lose into `ERRORS`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from examples.int4 import Int4 as OwnInt4
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import outergrad as og
from outergrad.core.coding import (
    Codecs,
    decode,
    decode_all,
    drops,
    encode,
    encode_all,
    nbytes,
    received,
    tensors,
)
from outergrad.core.errors import RefusedError
from outergrad.messages.header import DTYPES
from outergrad.messages.layout import Layout
from outergrad.messages.wire import Piece
from outergrad.wire import BF16, Codec, Int2, Int3, Int4, Int8, Plain, Sign, TopK
from sparse_trainings import lost, means_of, train

CODECS: dict[str, Codecs] = {
    "bf16": (BF16(),),
    "int8": (Int8(),),
    "topk": (TopK(0.1),),
    "all of them": (TopK(1.0),),
    "topk, bf16": (TopK(0.3), BF16()),
    "topk, int8": (TopK(0.1), Int8()),
    "int4": (Int4(),),
    "int3": (Int3(),),
    "int2": (Int2(),),
    "sign": (Sign(),),
    "topk, sign": (TopK(0.3), Sign()),
    "topk, int4": (TopK(0.3), Int4()),
    "one's own": (OwnInt4(),),
    "topk, one's own": (TopK(0.3), OwnInt4()),
}


def largest(x: Tensor, count: int = 1) -> Tensor:
    """Magnitude of the smallest entry of each row that is among so many largest ones."""
    return x.abs().sort(dim=-1, descending=True).values[..., [count - 1]]


def left_out(codec: TopK, x: Tensor) -> Tensor:
    """All of it, but for the largest entries; of equal ones at the limit any may be sent."""
    count = max(1, round(codec.fraction * x.shape[-1]))
    return torch.where(x.abs() > largest(x, count), 0.0, x.abs())


ERRORS: dict[type, Callable[[Any, Tensor], Tensor]] = {
    BF16: lambda _, x: 2.0**-8 * x.abs(),
    Int8: lambda _, x: 0.5001 / 127 * largest(x),
    **{kind: lambda codec, x: 16.001 / 2**codec.bits * largest(x) for kind in (Int4, Int3, Int2)},
    Sign: lambda _, x: 1.004 * largest(x) + x.abs(),
    OwnInt4: lambda _, x: 0.5001 / 7 * largest(x),
    TopK: left_out,
}
"""The most that a codec may lose of finite numbers, besides subnormal ones."""
SMALLEST = torch.finfo(torch.float32).tiny
shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 70))
dtypes = st.sampled_from(DTYPES)
by_codecs = pytest.mark.parametrize("codecs", CODECS.values(), ids=CODECS)
by_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def rows(shape: tuple[int, ...], scale: float = 1.0, seed: int = 0) -> Tensor:
    """Rows of different sizes, with zeros and ties, a row of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    found = scale * torch.randn(shape, generator=generator)
    found *= 10.0 ** torch.randint(-3, 3, (*shape[:-1], 1), generator=generator)
    found[found.abs() < 0.3 * scale] = 0.0
    found[:1, :1] = 0.0
    return found


def fitting(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In a dtype, and no larger than that and bfloat16 can be."""
    most = min(torch.finfo(dtype).max, torch.finfo(torch.bfloat16).max)
    return x.double().clamp(-most, most).to(dtype)


def turned(*values: float) -> Tensor:
    """A row, and its negative."""
    row = torch.tensor(values, dtype=torch.float64)
    return torch.stack([row, -row])[None]


VALUES: dict[str, Tensor] = {
    "no rows": torch.zeros(2, 0, 9),
    "no short rows": torch.zeros(2, 0, 3),
    "a number": torch.full((1, 1, 1), 0.3),
    "zeros": torch.zeros(1, 2, 33),
    "constants": turned(*[0.1] * 31),
    "one among zeros": turned(*[0.0] * 20, 0.7, *[0.0] * 20),
    "one among small": turned(*[1e-6] * 20, 0.7, *[-1e-6] * 20),
    "huge": turned(*[math.inf, 1.0, -2e38, 1e-30] * 5),
    "tiny": turned(*[2.0**-126, 2.0**-127, 0.0] * 7),
    "subnormal": turned(*[1e-40, -3e-42, 2.0**-149] * 7),
}


def check_close(codecs: Codecs, x: Tensor) -> None:
    found = received(codecs, x)
    assert found.shape == x.shape
    assert found.dtype == torch.promote_types(x.dtype, torch.float32)
    whole = x.double()
    errors = [ERRORS[type(codec)](codec, whole) for codec in codecs]
    assert ((found.double() - whole).abs() <= sum(errors) + SMALLEST).all()


@by_codecs
@settings(deadline=None)
@given(
    dtype=dtypes,
    shape=shapes,
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e20]),
    seed=st.integers(0, 99),
)
def test_rows_come_back_within_the_bound(codecs, dtype, shape, scale, seed):
    check_close(codecs, fitting(rows(shape, scale, seed), dtype))


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@by_codecs
def test_odd_rows_come_back_within_the_bound(codecs, values):
    for dtype in DTYPES:
        check_close(codecs, fitting(values, dtype))


@by_codecs
@settings(deadline=None)
@given(dtype=dtypes, shape=shapes, seed=st.integers(0, 9))
def test_what_is_written_follows_from_the_shape(codecs, dtype, shape, seed):
    """Not from the numbers: sites agree on lengths before they have them."""
    agreed = tensors(codecs, shape, dtype)
    assert sum(math.prod(s) * d.itemsize for s, d in agreed) == nbytes(codecs, shape, dtype)
    for x in (rows(shape, seed=seed), torch.zeros(shape), torch.full(shape, math.nan)):
        written = encode(codecs, x.to(dtype))
        assert [tuple(t.shape) for t in written] == [s for s, _ in agreed]
        stored = [t.to(d) for t, (_, d) in zip(written, agreed, strict=True)]
        for found, t in zip(stored, written, strict=True):
            assert found.to(t.dtype).allclose(t, rtol=0, atol=0, equal_nan=True)


@by_codecs
def test_encoding_is_a_function_of_the_numbers(codecs):
    """The same bytes each time, and wherever the numbers lie; these stay as they were."""
    x = rows((2, 3, 41))
    spread, kept, same = torch.stack([x, x], dim=-1)[..., 0], x.clone(), copy.deepcopy(codecs)
    first = encode(codecs, x)
    for again in (encode(codecs, x), encode(same, spread)):
        assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    assert x.equal(kept)


@by_codecs
def test_zeros_everywhere_mean_rows_of_zeros(codecs):
    """A message of fewer rows than were agreed is zeros behind them."""
    for dtype in DTYPES:
        written = [torch.zeros(s, dtype=d) for s, d in tensors(codecs, (2, 3, 41), dtype)]
        assert not decode(codecs, written, (2, 3, 41), dtype).any()


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


@by_codecs
def test_what_no_float32_can_be_comes_back_right_or_not_finite(codecs):
    x = torch.tensor([[[1e300, -2.0, 0.5]]], dtype=torch.float64)
    found = received(codecs, x)
    assert found.equal(x.where(found != 0, 0.0)) or not found.isfinite().all()


@pytest.mark.parametrize("codec", dict.fromkeys(sum(CODECS.values(), ())), ids=repr)
def test_what_it_says_of_itself_is_so(codec):
    """Methods ask no more of it: whether the next codec has values left, and what can be added."""
    x = rows((2, 3, 41))
    values, *others = codec.tensors(tuple(x.shape), x.dtype)
    assert codec.picks == (values.dtype == x.dtype)
    if codec.rounds_to is not None:
        assert [values, *others] == [Plain(tuple(x.shape), codec.rounds_to)]
        assert received((codec,), x).equal(x.to(codec.rounds_to).float())


@by_codecs
def test_a_method_is_the_same_with_the_same_codecs(codecs):
    """Sites compare what methods look like, and messages are laid out by equal settings."""
    assert all(isinstance(codec, Codec) for codec in codecs)
    one, other = og.DAD(wire=codecs), og.DAD(wire=copy.deepcopy(codecs))
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == repr(other)


@by_codecs
def test_tensors_that_are_encoded_together_are_written_as_alone(codecs):
    """Of one width and of several, with groups and without, and without rows."""
    shapes = ((1, 4, 64), (3, 2, 128), (1, 3, 65), (2, 2, 65), (1, 1, 256), (1, 0, 64))
    for dtypes in ((torch.float32,) * 6, (torch.float32, torch.float64) * 3):
        rows_K = [
            rows(s, seed=k).to(d) for k, (s, d) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        together = encode_all(codecs, rows_K)
        arriving = decode_all(codecs, together, rows_K)
        for x, joint, arrives in zip(rows_K, together, arriving, strict=True):
            alone = encode(codecs, x)
            assert [t.shape for t in joint.written] == [t.shape for t in alone]
            assert all(a.equal(b) for a, b in zip(joint.written, alone, strict=True))
            assert arrives.dtype == received(codecs, x).dtype
            assert arrives.equal(received(codecs, x))


def in_groups(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 64)).unflatten(-1, (-1, 64))


def squares_lost(bits: int, x: Tensor, level: float = 1.0) -> Tensor:
    """Of each group of 64, if so much of its largest magnitude is its clipping level."""
    groups = in_groups(x)
    half = 1 << (bits - 1)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    step = (level * largest / -half).bfloat16().double()
    multiples = (groups / step).round().clamp(-half, half - 1).nan_to_num(0.0)
    return (groups - multiples * step).square().sum(dim=-1)


def squares_lost_by(codec: Codec, x: Tensor) -> Tensor:
    return in_groups(received((codec,), x.float()).double() - x).square().sum(dim=-1)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e20])
@pytest.mark.parametrize("codec", [Int4(), Int3(), Int2()], ids=repr)
def test_few_bits_lose_no_more_than_without_clipping(codec, scale):
    """Of any group, but for the rounding of its step; in sum less. Groups stand alone."""
    x = rows((3, 5, 150), scale)
    lost, most = squares_lost_by(codec, x.double()), squares_lost(codec.bits, x.double())
    rounding = (2.0**-9 * in_groups(x.double()).norm(dim=-1)) ** 2
    assert (lost <= most + 1.0001 * rounding + SMALLEST).all()
    assert lost.sum() < 0.94 * most.sum()
    apart = [received((codec,), part) for part in x.split(64, dim=-1)]
    assert torch.cat(apart, dim=-1).equal(received((codec,), x))


DRAWN: dict[str, torch.distributions.Distribution] = {
    "normal": torch.distributions.Normal(0.0, 1.0),
    "two-sided exponential": torch.distributions.Laplace(0.0, 1.0),
    "heavy tails": torch.distributions.StudentT(3.0),
    "heavier tails": torch.distributions.StudentT(1.5),
    "uniform": torch.distributions.Uniform(-1.0, 1.0),
}


@pytest.mark.parametrize("drawn", DRAWN.values(), ids=DRAWN)
@pytest.mark.parametrize("codec", [Int4(), Int3(), Int2()], ids=repr)
def test_few_bits_lose_less_than_at_the_best_of_four_clipping_levels(codec, drawn):
    torch.manual_seed(0)
    x = drawn.sample((1, 400, 640)).double()
    tried = [squares_lost(codec.bits, x, level) for level in (1.0, 0.92, 0.8, 0.6)]
    assert squares_lost_by(codec, x).sum() < torch.stack(tried).amin(dim=0).sum()


@pytest.mark.parametrize("width", [1, 250, 256, 700])
def test_signs_lose_least_that_one_magnitude_per_group_can(width):
    """The mean magnitude: what is lost is all but the square of its sum, over the group's size."""
    x = rows((2, 3, width), 3.0).double()
    found = received((Sign(),), x.float()).double()
    for part, arrived in zip(x.split(256, dim=-1), found.split(256, dim=-1), strict=True):
        least = part.square().sum(-1) - part.abs().mean(-1) ** 2 * part.shape[-1]
        lost = (part - arrived).square().sum(-1)
        torch.testing.assert_close(lost, least, rtol=1e-2, atol=1e-3 * float(x.square().mean()))
        assert ((arrived < 0) == (part < 0)).logical_or(arrived == 0).all()


@pytest.mark.parametrize("codec", [Int4(), Int3(), Int2()], ids=repr)
def test_triplets_may_have_their_singular_values_on_either_side(codec):
    """Every row has steps of its own: there is nothing to gain by balancing its sides."""
    d_RO, a_RI = rows((1, 4, 90)), rows((1, 4, 70), seed=1)
    scale_R = 2.0 ** torch.arange(-6, 6, 3).view(4, 1)
    for side, t in ((1 / scale_R, d_RO), (scale_R, a_RI)):
        assert (received((codec,), t * side)).equal(received((codec,), t) * side)


# -- in messages ----------------------------------------------------------------------------------


def slot_of(*, lookup: bool) -> og.Slot:
    return og.Slot("l", "l.w", 35, 47, bias="l.b", groups=1 if lookup else 3, lookup=lookup)


def factors(slot: og.Slot, count: int, dtype: torch.dtype) -> og.Factors:
    d_GRO = rows((slot.groups, count, slot.outputs), seed=count).to(dtype)
    if slot.lookup:
        return og.Factors(d_GRO, torch.arange(count))
    a_GRI = rows((slot.groups, count, slot.inputs), seed=count + 1).to(dtype)
    return og.Factors(d_GRO, a_GRI, torch.randn(slot.groups, slot.outputs))


@by_dtypes
@pytest.mark.parametrize("lookup", [True, False])
@by_codecs
def test_messages_hold_encoded_rows_apart(codecs, lookup, dtype):
    """Ids and bias gradients come back as they were; rows that are not there are zeros."""
    slot = slot_of(lookup=lookup)
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


@by_dtypes
@by_codecs
def test_bytes_of_a_stranger_are_read_or_refused(codecs, dtype):
    """By the one error that stands for all that is."""
    slot, generator = slot_of(lookup=False), torch.Generator().manual_seed(0)
    layout = Layout(0, {}, [Piece(slot, 4, dtype, torch.float32, codecs)])
    for most in (1, 2, 256):
        message = torch.randint(0, most, (layout.nbytes,), generator=generator, dtype=torch.uint8)
        with suppress(RefusedError):
            (part,) = layout.gradients(message, site=1)
            assert part.d_GRO.shape == (3, 4, slot.outputs)
            assert part.a_GRI.shape == (3, 4, slot.inputs)


# -- in training ----------------------------------------------------------------------------------


@by_codecs
def test_what_is_lost_is_owed(codecs):
    """Where all that is not sent is remembered: what was applied and that are all there was."""
    method = og.RankDAD(rank=2, wire=codecs, error_feedback="dense", reduce="gather")
    if not drops(codecs):
        method = og.Sparse(density=0.3, wire=codecs)
    assert lost(train(method, 2, 3), 2, means_of(2, 3)) < 1e-4
