"""Gradients that are compressed together come out as those that are compressed by themselves."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import outergrad as og
from low_rank import train
from outergrad.exchange import _settings
from outergrad.exchange._bundles import _LARGE, _PADDING, Kind, bundles
from outergrad.linalg.outer import weight_gradient

SLOTS = [
    og.Slot("a", "a.weight", 40, 60),
    og.Slot("b", "b.weight", 40, 60),
    og.Slot("c", "c.weight", 35, 57, groups=2),
    og.Slot("d", "d.weight", 10, 64, bias="d.bias"),
    og.Slot("e", "e.weight", 300, 500),
]
METHODS = {
    "plain": og.RankDAD(rank=4, error_feedback=None),
    "feedback": og.RankDAD(rank=4),
    "all kept": og.RankDAD(rank=4, error_feedback="dense"),
    "more": og.RankDAD(rank=9, feedback_rank=3),
}


def gradient(slot, step, *, formed):
    """Rows with falling singular values that change a little from step to step."""
    seed = torch.Generator().manual_seed(SLOTS.index(slot))
    rows = 45
    d_GNO = torch.randn(slot.groups, rows, slot.outputs, generator=seed)
    a_GNI = torch.randn(slot.groups, rows, slot.inputs, generator=seed)
    seed.manual_seed(100 + step)
    a_GNI += 0.1 * torch.randn(slot.groups, rows, slot.inputs, generator=seed)
    d_GNO = d_GNO * torch.arange(1, rows + 1)[:, None] ** -1.0
    return d_GNO.mT @ a_GNI if formed else og.Factors(d_GNO, a_GNI)


@pytest.mark.parametrize("small", [0, 50_000])
@pytest.mark.parametrize("formed", [True, False])
@pytest.mark.parametrize("label", METHODS)
def test_together_as_alone(label, formed, small, monkeypatch):
    monkeypatch.setattr(_settings, "_SMALL", small)
    method = METHODS[label]
    joint, single = method.exchange(), {slot: method.exchange() for slot in SLOTS}
    for step in range(5):
        parts = [og.Part(s, gradient(s, step, formed=formed), method.rank) for s in SLOTS]
        for part, found in zip(parts, joint.compress(parts), strict=True):
            (expected,) = single[part.slot].compress([part])
            assert found.d_GRO.shape == (part.slot.groups, method.rank, part.slot.outputs)
            assert found.a_GRI.shape == (part.slot.groups, method.rank, part.slot.inputs)
            assert (found.b_GO is None) == (expected.b_GO is None)
            difference = weight_gradient(found) - weight_gradient(expected)
            assert difference.norm() < 1e-4 * weight_gradient(expected).norm()
        for exchange in (joint, *single.values()):
            exchange.settle(applied=True)


@pytest.mark.parametrize("label", METHODS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_layer_and_is_not_remembered(label, value):
    exchange = METHODS[label].exchange()
    for step in range(5):
        parts = [og.Part(s, gradient(s, step, formed=True), 4) for s in SLOTS[:4]]
        if step in (0, 2):
            parts[1].gradient[0, 3, 3] = value
        finite = [bool(weight_gradient(f).isfinite().all()) for f in exchange.compress(parts)]
        assert finite == [True, step not in (0, 2), True, True]
        exchange.settle(applied=True)


@pytest.mark.parametrize("reduce", ["gather", "two_way", "all_reduce"])
def test_of_small_matrices_all_is_remembered(reduce):
    """As if that had been asked for of every matrix."""
    factored, dense = (
        train(og.RankDAD(rank=4, reduce=reduce, error_feedback=feedback), 2, 4)
        for feedback in ("factored", "dense")
    )
    for found, expected in zip(factored, dense, strict=True):
        for gradients, others in zip(found[0], expected[0], strict=True):
            assert all(g.equal(others[name]) for name, g in gradients.items())


KINDS = st.builds(
    lambda rows, has_unsent, whole, shape: Kind(
        rows, has_unsent, whole, (torch.float32,), (torch.Size(shape),)
    ),
    st.sampled_from([4, 8]),
    st.booleans(),
    st.booleans(),
    st.tuples(st.integers(1, 3), st.integers(1, 500), st.integers(1, 500)),
)


@given(st.lists(KINDS, max_size=12))
def test_everything_is_in_one_bundle_that_is_not_mostly_zeros(kinds):
    found = bundles(tuple(kinds))
    assert sorted(i for bundle in found for i in bundle) == list(range(len(kinds)))
    for bundle in found:
        members = [kinds[i] for i in bundle]
        assert len({kind[:4] for kind in members}) == 1
        shapes = [kind.shapes[0] for kind in members]
        groups, heights, widths = zip(*shapes, strict=True)
        assert sum(groups) * max(heights) * max(widths) - sum(s.numel() for s in shapes) <= _PADDING
        assert len(members) == 1 or max(s.numel() for s in shapes) <= _LARGE
