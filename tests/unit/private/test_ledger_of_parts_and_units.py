"""Turns of parts where releases differ, and releases that protect different units."""

from __future__ import annotations

import pytest
import torch

from outergrad.capture.units import ids_of
from outergrad.private import CyclicPoisson, Ledger, Poisson, PoissonSampler, Release

PARTS = CyclicPoisson(0.05, 2)


def of(noise, sequence="a"):
    return Release(noise, PARTS, sequence=sequence)


def epsilon(*releases):
    pytest.importorskip("dp_accounting")
    ledger = Ledger(1e-5)
    for release, steps in releases:
        ledger.record(release, steps)
    return ledger.epsilon(accountant="rdp")


def test_a_part_may_have_all_turns_of_every_other_release():
    """Steps 0, 2, 4 … have less noise, and all of them are of the first part."""
    found = epsilon(*[(of(1.0), 1), (of(50.0), 1)] * 20)
    whole = epsilon((Release(1.0, PARTS.of_part), 20))
    assert found >= whole


def test_turns_go_on_behind_releases_of_other_sequences():
    alone = epsilon((of(1.0), 40), (of(1.0, "b"), 40))
    assert epsilon(*[(of(1.0), 1), (of(1.0, "b"), 1)] * 40) == pytest.approx(alone)
    other = Release(9.0, Poisson(0.01)), 3
    halves = epsilon((of(1.0), 20), other, (of(1.0), 20))
    assert halves == pytest.approx(epsilon((of(1.0), 40), other))


@pytest.mark.parametrize("first", ["sample", "patient"])
def test_a_ledger_is_about_one_unit(first):
    one, other = (Release(1.0, Poisson(0.1, unit)) for unit in ("sample", "patient"))
    one, other = (one, other) if first == "sample" else (other, one)
    ledger = Ledger(1e-5)
    ledger.record(one, 3)
    with pytest.raises(ValueError, match="a ledger of its own"):
        ledger.record(other)
    assert ledger.steps == 3
    ledger.record(one)


def test_samples_are_not_drawn_in_groups():
    with pytest.raises(ValueError, match="unit='patient'"):
        PoissonSampler(6, 0.5, groups=[0, 0, 1, 1, 2, 2], unit="sample")


def test_ids_of_tensors_are_those_of_their_numbers():
    mixed = [torch.tensor(7), 7, "7", torch.tensor([7])[0]]
    assert ids_of(mixed, "here") == ("7",) * 4
    with pytest.raises(TypeError, match="a Tensor is no id"):
        ids_of([torch.tensor(7.0)], "here")
