"""When factors travel, and how many bytes that is."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import outergrad as og
from cases import build
from outergrad.core.types import Unit
from ranks import run_on_lasting_groups

LINEAR = Unit((og.Slot("l", "l.weight", 60, 50, bias="l.bias"),), ("l.weight", "l.bias"), 60 * 51)


@pytest.mark.parametrize("method", [og.DAD(), og.DAD(reveal="activations")])
@pytest.mark.parametrize("sites", [2, 3, 4, 8])
def test_break_even_is_where_the_choice_turns(method, sites):
    compressor = method.compressor()
    limit = compressor.break_even(LINEAR, sites)
    for rows in range(1, 80):
        if min(rows, 50) == rows:
            assert compressor.taps(LINEAR, [[rows]] * sites) == (rows < limit)


def test_the_site_with_most_rows_decides():
    compressor = og.DAD().compressor()
    assert compressor.taps(LINEAR, [[10], [10]])
    assert not compressor.taps(LINEAR, [[10], [40]])
    assert compressor.taps(LINEAR, [[0], [20]])


def test_one_site_sends_nothing():
    assert not og.DAD().compressor().taps(LINEAR, [[1]])
    assert og.DAD(always=True).compressor().taps(LINEAR, [[1]])


def test_tied_weights_show_their_sum_alone():
    embed = og.Slot("e", "e.weight", 6, 2000, lookup=True)
    head = og.Slot("h", "e.weight", 2000, 6)
    tied = Unit((embed, head), ("e.weight",), 12_000)
    assert not og.DAD(always=True).compressor().taps(tied, [[2, 2]] * 2)
    assert og.DAD(always=True).compressor().taps(tied, [[2, 0]] * 2), "only one of both is used"
    assert og.DAD(reveal="activations").compressor().taps(tied, [[2, 2]] * 2)


def test_always_has_no_break_even():
    assert math.isinf(og.DAD(always=True).compressor().break_even(LINEAR, 2))


@pytest.mark.parametrize("sites", [2, 3, 4])
@pytest.mark.parametrize("reveal", ["gradient", "activations"])
@pytest.mark.parametrize("rows", [1, 8, 24, 25, 40])
def test_never_more_bytes_than_dense(sites, reveal, rows):
    """Headers apart: they are half a kilobyte per step and site."""
    torch.manual_seed(0)
    model = nn.Linear(50, 60)
    x = torch.randn(rows, 50)

    def sent(method, rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, method, group=group)
        for _ in range(2):
            replica(x + rank).square().mean().backward()
        return session.stats().sent_bytes

    def body(rank, group):
        return sent(og.DAD(reveal=reveal), rank, group), sent(og.Dense(), rank, group)

    for factors, dense in run_on_lasting_groups(sites, body):
        assert factors <= dense + 200 * (sites - 1)


@pytest.mark.parametrize("name", [n for n, make in build().items() if make().factors])
def test_forced_factors_are_factors(name):
    case = build()[name]()

    def body(rank, group):
        model = copy.deepcopy(case.model)
        session = og.distribute(model, og.DAD(always=True), group=group)
        y = model(*case.batches[rank])
        case.loss(y[0] if isinstance(y, tuple) else y).backward()
        return {line.parameter: line for line in session.coverage()}

    for lines in run_on_lasting_groups(2, body):
        for parameter in case.factors:
            assert lines[parameter].travels == "factors", str(lines[parameter])


def test_bytes_of_the_papers_mlp():
    """784-1024-1024-10 with 32 rows at two sites: one thirteenth of the dense gradient."""
    model = nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    batches = [torch.randn(32, 784) for _ in range(2)]

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, group=group)
        for _ in range(2):
            replica(batches[rank]).logsumexp(1).mean().backward()
        return session.stats().sent_bytes

    dense = sum(p.nbytes for p in model.parameters())
    assert dense / run_on_lasting_groups(2, body)[0] > 13
