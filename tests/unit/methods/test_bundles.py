"""Gradients that are compressed together come out as those that are compressed by themselves."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import outergrad as og
from asking import inheritance
from low_rank import train
from outergrad.core.types import Unit
from outergrad.linalg.outer import weight_gradient
from outergrad.methods.low_rank import settings as _settings
from outergrad.methods.low_rank.memory import residual_of
from outergrad.methods.low_rank.triplets import _LARGE, _PADDING, Form, Gathered, bundles

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
    joint, single = method.compressor(), {slot: method.compressor() for slot in SLOTS}
    for step in range(5):
        parts = [og.Part(s, gradient(s, step, formed=formed), method.rank) for s in SLOTS]
        for part, found in zip(parts, joint.compress(parts), strict=True):
            (expected,) = single[part.slot].compress([part])
            assert found.d_GRO.shape == (part.slot.groups, method.rank, part.slot.outputs)
            assert found.a_GRI.shape == (part.slot.groups, method.rank, part.slot.inputs)
            assert (found.b_GO is None) == (expected.b_GO is None)
            difference = weight_gradient(found) - weight_gradient(expected)
            assert difference.norm() < 1e-4 * weight_gradient(expected).norm()
        for compressor in (joint, *single.values()):
            compressor.commit(applied=True)


@pytest.mark.parametrize("label", METHODS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_layer_and_is_not_remembered(label, value):
    compressor = METHODS[label].compressor()
    for step in range(5):
        parts = [og.Part(s, gradient(s, step, formed=True), 4) for s in SLOTS[:4]]
        if step in (0, 2):
            parts[1].gradient[0, 3, 3] = value
        finite = [bool(weight_gradient(f).isfinite().all()) for f in compressor.compress(parts)]
        assert finite == [True, step not in (0, 2), True, True]
        compressor.commit(applied=True)


@pytest.mark.parametrize("reduce", ["gather", "two_way", "all_reduce", "alternate"])
def test_of_small_matrices_all_is_remembered(reduce):
    """As if that had been asked for of every matrix."""
    factored, dense = (
        train(og.RankDAD(rank=4, reduce=reduce, error_feedback=feedback), 2, 4)
        for feedback in ("factored", "dense")
    )
    for found, expected in zip(factored, dense, strict=True):
        for gradients, others in zip(found[0], expected[0], strict=True):
            assert all(g.equal(others[name]) for name, g in gradients.items())


@pytest.mark.parametrize("formed", [True, False])
@pytest.mark.parametrize("label", METHODS)
@pytest.mark.parametrize("small", [0, 50_000])
def test_after_steps_without_a_gradient_it_goes_on(label, formed, small, monkeypatch):
    """Nor after one of lower rank: whole rows of outputs never have a gradient."""
    monkeypatch.setattr(_settings, "_SMALL", small)
    compressor, slot = METHODS[label].compressor(), og.Slot("f", "f.weight", 60, 50)
    generator = torch.Generator().manual_seed(3)
    for scales in ([1.0] * 4, [0.0] * 4, [0.0] * 4, [0.0] * 4, [1.0, 0, 0, 0], [1.0] * 4):
        for _ in range(4):
            d_GRO = torch.randn(1, 4, 60, generator=generator) * torch.tensor(scales)[:, None]
            d_GRO[..., :30] = 0.0
            factors = og.Factors(d_GRO.repeat(1, 5, 1), torch.randn(1, 20, 50, generator=generator))
            whole_GOI = factors.d_GRO.mT @ factors.a_GRI
            (found,) = compressor.compress([og.Part(slot, whole_GOI if formed else factors, 4)])
            compressor.commit(applied=True)
    if label == "plain":
        left = weight_gradient(found) - whole_GOI[0]
        assert left.norm() < 1e-4 * whole_GOI.norm(), "four triplets hold all of rank four"
    assert weight_gradient(found).norm() > 0.5 * whole_GOI.norm()


@pytest.mark.parametrize("classes", [2, 3, 5, 8])
def test_one_iteration_is_enough_where_the_first_gradient_has_fewer_directions(
    classes, monkeypatch
):
    """As that of a softmax, which has one fewer than there are classes, in every step."""
    compressor, slot = og.RankDAD(rank=4).compressor(), og.Slot("h", "h.weight", classes, 64)
    cold, alone = [], Gathered._alone
    monkeypatch.setattr(Gathered, "_alone", lambda *args: cold.append(1) or alone(*args))
    generator = torch.Generator().manual_seed(5)
    d_GNO = torch.randn(1, 32, classes, generator=generator) * 0.7 ** torch.arange(classes)
    d_GNO -= d_GNO.mean(dim=2, keepdim=True)
    a_GNI = torch.randn(1, 32, 64, generator=generator)
    for _ in range(6):
        a_GNI += 0.1 * torch.randn(1, 32, 64, generator=generator)
        owed = residual_of(compressor._memories[slot])
        whole_GOI = d_GNO.mT @ a_GNI + (0 if owed is None else owed)
        (found,) = compressor.compress([og.Part(slot, d_GNO.mT @ a_GNI, min(4, classes))])
        compressor.commit(applied=True)
        error = (whole_GOI[0] - weight_gradient(found)).norm()
        best = torch.linalg.svdvals(whole_GOI[0].double())[4:].norm()
        assert error < 1.02 * best + 1e-5 * whole_GOI.norm()
    assert len(cold) == 1, "all but the first step start where the last one ended"


def test_what_goes_on_from_fewer_directions_is_the_same_to_the_bit_when_it_was_loaded():
    slot = og.Slot("h", "h.weight", 5, 64)
    compressor, loaded = (og.RankDAD(rank=4).compressor() for _ in range(2))
    generator = torch.Generator().manual_seed(5)
    whole_GOI = torch.randn(1, 5, 4, generator=generator) @ torch.randn(4, 64, generator=generator)
    compressor.compress([og.Part(slot, whole_GOI, 4)])
    compressor.commit(applied=True)
    assert compressor._memories[slot].q_GIR.shape[2] == 4, "fewer than the five iterated on"
    loaded.load(inheritance(compressor.state(), [Unit((slot,), (slot.weight,), slot.numel)]))
    for _ in range(3):
        whole_GOI = torch.randn(1, 5, 64, generator=generator)
        (found,), (other,) = (
            one.compress([og.Part(slot, whole_GOI, 4)]) for one in (compressor, loaded)
        )
        assert found.d_GRO.equal(other.d_GRO)
        assert found.a_GRI.equal(other.a_GRI)
        compressor.commit(applied=True)
        loaded.commit(applied=True)


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_a_batch_of_few_rows_loses_nothing_that_was_owed(rows):
    """It has fewer rows than there are directions, but the memory has rows of its own."""
    compressor, slot = og.RankDAD(rank=4).compressor(), og.Slot("f", "f.weight", 300, 400)
    generator = torch.Generator().manual_seed(3)
    for count in (64, 64, 64, rows):
        d_GRO = torch.randn(1, count, 300, generator=generator)
        factors = og.Factors(d_GRO, torch.randn(1, count, 400, generator=generator))
        before = compressor._memories[slot]
        (found,) = compressor.compress([og.Part(slot, factors, min(4, count))])
        compressor.commit(applied=True)
    owed = weight_gradient(before.residual) + weight_gradient(factors)
    after = weight_gradient(compressor._memories[slot].residual)
    lost = (owed - weight_gradient(found) - after).norm() / owed.norm()
    assert lost < 1e-4


def test_memory_does_not_grow_where_other_layers_are_used_in_each_step():
    """Views of one tensor for several layers do not outlive what was remembered of the others."""
    slots = [og.Slot(f"{i}", f"{i}.weight", 40, 50) for i in range(20)]
    compressor = og.RankDAD(rank=4).compressor()
    for used in range(len(slots), 0, -1):
        parts = [og.Part(slot, torch.randn(1, 40, 50), 4) for slot in slots[:used]]
        compressor.compress(parts)
        compressor.commit(applied=True)
    held = [memory for memory in map(compressor._memories.__getitem__, slots) if memory]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for memory in held
        for t in (memory.q_GIR, memory.residual)
    }
    assert sum(storages.values()) <= 1.01 * sum(m.q_GIR.nbytes + m.residual.nbytes for m in held)


KINDS = st.builds(
    lambda rows, has_residual, whole, shape: Form(
        rows, has_residual, whole, (torch.float32,), (torch.Size(shape),)
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
