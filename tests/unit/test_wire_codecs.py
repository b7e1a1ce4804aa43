"""What is of one codec alone: bytes, and what each keeps; and what cannot stand in `wire=`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import outergrad as og
from outergrad.core.coding import nbytes, received, tensors
from outergrad.wire import BF16, Int8, TopK

CODECS: dict[str, tuple[Any, ...]] = {
    "bf16": (BF16(),),
    "int8": (Int8(),),
    "topk": (TopK(0.1),),
    "all of them": (TopK(1.0),),
    "topk, bf16": (TopK(0.3), BF16()),
    "topk, int8": (TopK(0.1), Int8()),
}
by_codecs = pytest.mark.parametrize("codecs", CODECS.values(), ids=CODECS)


def picked(fraction: float, width: int) -> int:
    return max(1, round(fraction * width))


@settings(deadline=None)
@given(width=st.integers(1, 70), fraction=st.floats(0.01, 1.0), seed=st.integers(0, 99))
def test_topk_keeps_the_largest_to_the_bit(width, fraction, seed):
    x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(seed)).round(decimals=1)
    found = received((TopK(fraction),), x)
    kept = found != 0
    assert found[kept].equal(x[kept])
    whole = x.abs().sort(dim=-1, descending=True).values[..., : picked(fraction, width)]
    assert found.abs().sum(dim=-1).allclose(whole.sum(dim=-1))


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


def test_a_row_of_int8_with_an_infinity_is_nothing_but_nan():
    assert received((Int8(),), torch.tensor([[[1.0, math.inf, 0.0]]])).isnan().all()


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


def test_a_codec_is_a_sequence_of_one():
    """A method is the same, and reads the same, however its codecs were passed."""
    assert og.DAD(wire=Int8()) == og.DAD(wire=[Int8()]) == og.DAD(wire=(Int8(),))
    assert hash(og.DAD(wire=[TopK(0.1)])) == hash(og.DAD(wire=TopK(fraction=0.1)))
    assert "wire=(TopK(fraction=0.1), Int8())" in repr(og.RankDAD(wire=[TopK(0.1), Int8()]))
    assert og.RankDAD().wire == og.DAD().wire == ()
