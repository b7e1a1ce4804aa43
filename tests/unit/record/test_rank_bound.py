"""The recorded bound is that of the rows of all sites, and no effective rank is above it."""

from __future__ import annotations

import copy

import pytest
import torch

import outergrad as og
from by_sample import built, loss_of
from cases import Events
from outergrad.spectra import numerical_rank
from ranks import run_on_lasting_groups

CASES = built()
SHAPES = {"0.weight": 40, "2.weight": 32}
METHODS = {
    "dad": (og.DAD(always=True), 8),
    "rank-dad": (og.RankDAD(rank=2, error_feedback=None), 8),
    "with a memory": (og.RankDAD(rank=2), None),
    "dense": (og.Dense(), None),
}


def recorded(name, method, steps=2):
    def body(rank, group):
        model, events = copy.deepcopy(CASES[name].model), Events()
        session = og.distribute(model, method, group=group, recorder=events)
        for _ in range(steps):
            model.zero_grad()
            loss_of(model, CASES[name].batches[rank]).backward()
        session.detach()
        return events, {n: p.grad for n, p in model.named_parameters()}

    return run_on_lasting_groups(2, body)


@pytest.mark.parametrize("label", METHODS)
def test_rows_of_all_sites_bound_what_travels_whole_and_widths_all_else(label):
    """The sites have five rows and three; what was not sent before has rows of its own."""
    method, rows = METHODS[label]
    for events, gradients in recorded("wide", method):
        measured = [event for event in events.layers if event.effective_rank is not None]
        assert len(measured) == 4
        for event in measured:
            assert event.rank_bound == (rows or SHAPES[event.layer])
            assert event.effective_rank <= event.rank_bound
            assert numerical_rank(gradients[event.layer]) <= event.rank_bound


@pytest.mark.parametrize("name", ["conv", "embedding", "attention", "used twice"])
def test_no_effective_rank_is_above_the_bound(name):
    found = [
        event
        for events, _ in recorded(name, og.DAD(always=True))
        for event in events.layers
        if event.rank_bound is not None
    ]
    assert found
    for event in found:
        assert 0 < event.effective_rank <= event.rank_bound + 1e-6
        assert torch.tensor(event.rank_bound).isfinite()
