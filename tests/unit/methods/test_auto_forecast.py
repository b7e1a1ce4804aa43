"""What og.Auto() expects of a way before it is tried."""

from __future__ import annotations

import pytest

import outergrad as og
from outergrad.comm.cost import RingCost
from outergrad.core.types import Link, Slot, Unit
from outergrad.methods.auto.ways import Forecaster
from outergrad.methods.dense import DenseCompressor

LINK, FLOPS, WIDTH, ROWS = Link(1e-4, 12.5e6), 2e10, 128, 1024
METHODS = [og.Dense(), og.DAD(), og.RankDAD(rank=4)]


def embedding(ids: int) -> Unit:
    looked_up = Slot("token", "token.weight", WIDTH, ids, lookup=True)
    formed = Slot("token", "token.weight", ids, WIDTH)
    return Unit((looked_up,), (formed.weight,), formed.numel, (formed,))


def linear(outputs: int, inputs: int) -> Unit:
    slot = Slot("linear", "linear.weight", outputs, inputs)
    return Unit((slot,), (slot.weight,), slot.numel, (slot,))


def forecast(method, unit):
    compressor = method.compressor() or DenseCompressor()
    compressor.settle(RingCost(2), frozenset())
    return Forecaster(RingCost(2), LINK, FLOPS).unit(unit, compressor, [[ROWS]] * 2)


@pytest.mark.parametrize("method", METHODS[:2], ids=repr)
def test_looking_up_takes_as_long_in_a_larger_table(method):
    few, many = (forecast(method, embedding(ids)).compute_s for ids in (8_000, 80_000))
    assert few == many
    assert many < 0.01


def test_low_rank_of_a_table_is_expected_to_be_fewer_bytes_and_no_more_work_than_the_bytes_save():
    """A way that seems far slower than it is gets no trial: the table would stay exact for good."""
    dense, exact, low_rank = (forecast(method, embedding(8_000)) for method in METHODS)
    assert low_rank.link_s < exact.link_s < dense.link_s
    assert low_rank.seconds(LINK) < exact.seconds(LINK)


@pytest.mark.parametrize("shape", [(2048, 64), (64, 2048), (512, 512)], ids=str)
def test_what_is_found_from_a_formed_gradient_follows_from_its_size_alone(shape):
    """Beside forming it, which all ways have in common that form it."""
    method = og.RankDAD(rank=4, error_feedback="dense")  # which needs it formed
    one, turned = (forecast(method, linear(*s)).compute_s for s in (shape, shape[::-1]))
    assert one == pytest.approx(turned)
