"""A step that is over is freed by its last reference: nothing waits for the garbage collector.

Python looks for cycles when enough small objects have come together, however large the buffers
behind them are. Until then the messages of a step would stay in memory, on a GPU as well.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import outergrad as og
from cases import EVERY
from outergrad.step.step import SharedStep
from outergrad.step.unsynced import UnsyncedStep
from ranks import run_ranks

SITES, STEPS, KEPT = 2, 12, 3
"""Of each site: a step is kept for sites that lack it until the next one is over."""

METHODS: dict[str, Any] = {
    **EVERY,
    "rank-dad": og.RankDAD(rank=2),
    "rank-dad, all-reduced": og.RankDAD(rank=2, reduce="all_reduce"),
    "sparse": og.Sparse(density=0.1, always=True),
    "every": og.RankDAD(rank=2, every=3),
    "local steps": og.LocalSteps(2),
    "local steps, overlapping": og.LocalSteps(2, overlap=1),
    "local steps, with a quorum": og.LocalSteps(2, quorum=1.0, grace=0),
}


def steps_in_memory() -> int:
    return sum(isinstance(one, (SharedStep, UnsyncedStep)) for one in gc.get_objects())


@pytest.fixture
def collector_off():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("label", METHODS)
@pytest.mark.usefixtures("collector_off")
def test_steps_are_freed_when_they_are_over(label: str):
    def site(rank: int, group: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.BatchNorm1d(60), nn.Linear(60, 40))
        session = og.distribute(model, METHODS[label], group=group)
        optimizer = SGD(model.parameters(), 0.1)
        for step in range(STEPS):
            if step % 4 == 3:
                with session.no_sync():
                    model(torch.randn(8, 40)).square().mean().backward()
            optimizer.zero_grad()
            model(torch.randn(8, 40)).square().mean().backward()
            optimizer.step()
        session.detach()

    before = steps_in_memory()
    run_ranks(SITES, site)
    assert steps_in_memory() - before <= SITES * KEPT
