"""Samples of one unit, as a patient, are clipped as one: the gradient of each unit is the oracle's.

The oracle takes one backward per unit, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import outergrad as og
from by_sample import Gradients, SampleCase, built, check_close, length, loss_of, times, total
from cases import mlp
from covering import covering
from ranks import run_on_lasting_groups

CLIP, BATCH = 0.4, 4
CASES = built()
IDS = [["ann", "bo", "ann", "cy", "ann"], [7, 7, 7]]
"""Of the samples of each site; neither in order, nor of equally many."""
LITTLE = 1e-9
"""So little noise that a gradient is formed, and nothing else is to be seen of it."""
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")


def flat(unit: Gradients) -> Gradients:
    return times(min(1.0, CLIP / length(unit)) if length(unit) else 1.0, unit)


def automatic(unit: Gradients) -> Gradients:
    return times(CLIP / (length(unit) + 0.01), unit)


def by_unit(case: SampleCase, site: int, ids: Sequence[Any]) -> list[Gradients]:
    """The gradient of the summed losses of each unit's samples, by plain autograd in float64."""
    model, x = copy.deepcopy(case.model).double(), case.batches[site]
    x = x.double() if x.is_floating_point() else x
    found = []
    for one in dict.fromkeys(ids):
        rows = [row for row, other in enumerate(ids) if other == one]
        model.zero_grad()
        (len(rows) * loss_of(model, x[rows])).backward()
        params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in params.items()}
        found.append({name: g.clone() for name, g in grads.items()})
    return found


def expected(case: SampleCase, clip: Callable[[Gradients], Gradients], ids=IDS) -> Gradients:
    units = [one for site, own in enumerate(ids) for one in by_unit(case, site, own)]
    return times(1 / BATCH, total([clip(one) for one in units]))


def shared(case: SampleCase, method: Any, ids: Sequence[Any] = IDS, **about: Any):
    """What each site has in `param.grad` after a step."""

    def body(rank, group):
        model = copy.deepcopy(case.model)
        settings = {"clip": CLIP, "noise": 0.0, "batch": BATCH, "unit": "patient"}
        private = og.Private(**(settings | about))
        session = og.distribute(model, method, group=group, transform=private)
        session.units(ids[rank])
        loss_of(model, case.batches[rank]).backward()
        session.detach()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    return run_on_lasting_groups(len(case.batches), body)


# -- what is clipped ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "noise", "clipping"),
    covering(list(CASES), [0.0, LITTLE], ["flat", "automatic"], quick=24, every=2),
)
def test_clipped_sums_are_those_of_units_one_by_one(name, noise, clipping):
    case, clip = CASES[name], {"flat": flat, "automatic": automatic}[clipping]
    method = og.Dense() if noise else og.DAD(always=True)
    for grads in shared(case, method, clipping=clipping, noise=noise):
        check_close(grads, expected(case, clip))


@pytest.mark.parametrize("name", ["linear", "conv", "tied"])
def test_a_unit_for_each_sample_is_no_unit(name):
    case = CASES[name]
    apart = [list(range(len(x))) for x in case.batches]
    plain = shared(case, og.Dense(), apart, noise=LITTLE)
    check_close(plain[0], expected(case, flat, apart))


@pytest.mark.parametrize("noise", [0.0, LITTLE])
def test_layers_are_clipped_by_themselves(noise):
    case = CASES["linear"]
    names = [name.rpartition(".")[0] for name, _ in case.model.named_parameters()]

    def clip(unit):
        found, layers = {}, dict.fromkeys(names)
        for layer in layers:
            part = {n: g for n, g in unit.items() if n.rpartition(".")[0] == layer}
            found |= times(min(1.0, CLIP / len(layers) ** 0.5 / length(part)), part)
        return found

    for grads in shared(case, og.Dense(), clipping="per_layer", noise=noise):
        check_close(grads, expected(case, clip))


def test_a_unit_is_never_longer_than_the_limit():
    """However many samples it has."""
    case = CASES["linear"]
    for samples in (1, 3, 40):
        batches = [case.batches[0], 5 * case.batches[1][:1].repeat(samples, 1)]
        less = [batches[0], batches[1][:0]]
        ids = [IDS[0], [7] * samples]
        whole = shared(SampleCase(case.model, batches), og.Dense(), ids)[0]
        without = shared(SampleCase(case.model, less), og.Dense(), [IDS[0], []])[0]
        change = {n: BATCH * (g - without[n]) for n, g in whole.items()}
        assert CLIP * 0.999 < length(change) < CLIP * (1 + 1e-5)


def test_adaptive_clipping_counts_units():
    private = og.Private(clip=1.0, noise=0.0, batch=4, clipping="adaptive", unit="patient")

    def body(rank, group):
        model = torch.nn.Linear(1, 1, bias=False)
        own = copy.deepcopy(private)
        session = og.distribute(model, og.Dense(), group=group, transform=own)
        session.units(["a", "a", "b", "c"])
        model(torch.tensor([0.6, 0.6, 0.6, 0.6])[:, None]).mean().backward()
        session.detach()
        return float(own.clip_now)

    # Two of three units stay below, as "a" has 1.2: of four expected, 2 + (4 - 3) / 2.
    for found in run_on_lasting_groups(1, body):
        assert found == pytest.approx(np.exp(-0.2 * ((2 + 0.5) / 4 - 0.5)), rel=1e-5)


# -- how ids are given ----------------------------------------------------------------------------

MODEL = mlp(6, 7, 5)
X = torch.randn(4, 6)


def in_session(do, unit="patient", **about):
    def body(rank, group):
        model = copy.deepcopy(MODEL)
        private = og.Private(clip=CLIP, noise=0.0, batch=BATCH, unit=unit, **about)
        session = og.distribute(model, og.Dense(), group=group, transform=private)
        do(session, model)
        session.detach()

    run_on_lasting_groups(1, body)


def test_ids_may_be_texts_numbers_and_tensors():
    found = []

    def do(session, model):
        for ids in (["1", "2", "1", "2"], (1, 2, 1, 2), torch.tensor([1, 2, 1, 2])):
            model.zero_grad()
            session.units(ids)
            loss_of(model, X).backward()
            found.append(model[0].weight.grad.clone())
        model.zero_grad()
        session.units(np.array([1, 2, 3, 2]))
        loss_of(model, X).backward()
        assert not torch.equal(model[0].weight.grad, found[0])

    in_session(do)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_number_and_its_text_are_one_unit():
    def do(session, model):
        grads = []
        for ids in ([7, "7", 8, 9], [7, 7, 8, 9]):
            model.zero_grad()
            session.units(ids)
            loss_of(model, X).backward()
            grads.append(model[0].weight.grad.clone())
        assert torch.equal(*grads)

    in_session(do)


def test_a_batch_without_ids_is_refused():
    """Also if the batch before had some, of as many samples."""

    def do(session, model):
        session.units([1, 2, 1, 2])
        loss_of(model, X).backward()
        model.zero_grad()
        with pytest.raises(RuntimeError, match=r"call session.units\(ids\) before each forward"):
            loss_of(model, X).backward()

    in_session(do)


def test_ids_after_the_forward_are_too_late():
    def do(session, model):
        loss = loss_of(model, X)
        session.units([1, 2, 1, 2])
        with pytest.raises(RuntimeError, match="one id for each of its 4 samples"):
            loss.backward()

    in_session(do)


def test_an_evaluation_takes_no_ids():
    def do(session, model):
        session.units([1, 2, 1, 2])
        with torch.no_grad():
            model(torch.randn(9, 6))
        loss_of(model, X).backward()

    in_session(do)


def test_ids_of_another_number_are_refused():
    def do(session, model):
        session.units([1, 2, 3])
        with pytest.raises(ValueError, match="3 ids were given, and the model is called with 4"):
            model(X)

    in_session(do)


@pytest.mark.parametrize("odd", [None, float("nan"), 1.0, True, (1, 2)], ids=str)
def test_what_is_no_id_is_refused(odd):
    """A missing value, of which each would be a unit of its own, above all."""

    def do(session, model):
        with pytest.raises(TypeError, match="is no id: give a whole number or a text"):
            session.units([1, 2, odd, 3])

    in_session(do)


def test_ids_need_a_transform_that_asks_for_them():
    def do(session, model):
        with pytest.raises(RuntimeError, match=r"og.Private\(unit='patient'\)"):
            session.units([1, 2, 1, 2])

    in_session(do, unit="sample")


def test_a_unit_has_a_name():
    for unit in ("", " ", None, 3):
        with pytest.raises(ValueError, match=r"unit=.*use 'sample', or a word as 'patient'"):
            og.Private(clip=1.0, noise=1.0, batch=8, unit=unit)
    assert "unit='patient'" in repr(og.Private(clip=1.0, noise=1.0, batch=8, unit="patient"))


def test_an_empty_batch_has_no_ids():
    def do(session, model):
        session.units([])
        loss_of(model, X[:0]).backward()
        assert model[0].weight.grad is None or not model[0].weight.grad.any()

    in_session(do)


# -- several passes -------------------------------------------------------------------------------


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_passes_of_other_units_add_up(clipping):
    def do(session, model):
        session.units([1, 1, 2, 3])
        loss_of(model, X).backward()
        whole = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        with session.no_sync():
            session.units([1, 1])
            loss_of(model, X[:2]).backward()
        session.units([2, 3])
        loss_of(model, X[2:]).backward()
        for p, wanted in zip(model.parameters(), whole, strict=True):
            torch.testing.assert_close(p.grad, wanted, rtol=1e-5, atol=1e-7)

    in_session(do, clipping=clipping)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("shares", [True, False])
def test_a_unit_in_two_passes_is_refused(shares, clipping):
    """It would be clipped twice. Its id is not told: other sites may read the error."""

    def do(session, model):
        with session.no_sync():
            session.units(["ann", "bo"])
            loss_of(model, X[:2]).backward()
            if not shares:
                session.units(["cy", "ann"])
                with pytest.raises(RuntimeError, match="1 of the 2 units") as told:
                    loss_of(model, X[2:]).backward()
        if shares:
            session.units(["cy", "ann"])
            with pytest.raises(
                RuntimeError, match="put all samples of a unit into one pass"
            ) as told:
                loss_of(model, X[2:]).backward()
        assert "ann" not in str(told.value)

    in_session(do, clipping=clipping)


def test_the_next_step_may_have_the_same_units():
    def do(session, model):
        for _ in range(2):
            model.zero_grad()
            with session.no_sync():
                session.units([1, 2])
                loss_of(model, X[:2]).backward()
            session.units([3, 3])
            loss_of(model, X[2:]).backward()

    in_session(do)


def test_thrown_away_passes_are_forgotten():
    def do(session, model):
        with session.no_sync():
            session.units([1, 2])
            loss_of(model, X[:2]).backward()
        model.zero_grad()
        session.units([1, 2, 3, 3])
        loss_of(model, X).backward()

    in_session(do)
