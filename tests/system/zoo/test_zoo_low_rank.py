"""Models that nobody here wrote: what low rank leaves out of their gradients is not lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from zoo_methods import LOW_RANK
from zoo_runs import SITES, Gradients, assert_each_near, assert_equal_sites, course, train
from zoo_table import ZOO

import outergrad as og
from covering import covering

pytestmark = [
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides"),
    pytest.mark.usefixtures("large_matrices"),
]

LIMIT = 1e-5
"""Relative: memories are rounded in every step."""

ZERO = torch.zeros((), dtype=torch.float64)

SMALL = [name for name, case in ZOO.items() if case.quick]
PAIRS = {
    pair.values: pair
    for pair in (
        *covering(ZOO.keys(), LOW_RANK.keys(), quick=0, every=6),
        *covering(SMALL, ["rank-dad gather", "powersgd"]),
    )
}


def residual_of(session: og.Session) -> dict[str, Tensor]:
    """What this site still owes to the mean gradients, in float64."""
    states = session.state_dict()["exchanges"]
    memories = {k: v for state in states for k, v in state["own"]["memories"].items()}
    return {name: _residuals(memory) for name, memory in memories.items()}


def _residuals(memory: dict[str, Tensor]) -> Tensor:
    if "unsent_deltas" in memory:
        return memory["unsent_deltas"].double().mT @ memory["unsent_activations"].double()
    return memory.get("unsent", ZERO).double()


def total(steps: list[Gradients]) -> Gradients:
    """Of all steps, in float64."""
    return {
        name: None if first is None else sum(step[name].double() for step in steps)
        for name, first in steps[0].items()
    }


@pytest.mark.parametrize(("name", "method"), PAIRS.values())
def test_what_was_applied_and_what_is_unsent_are_all_gradients(name, method):
    results = train(name, LOW_RANK[method], residual_of)
    assert_equal_sites([found for found, _ in results])
    places = {name for _, residual in results for name in residual}
    owed = {p: sum(residual.get(p, ZERO) for _, residual in results) / SITES for p in places}
    assert any(residual.norm() > 0 for residual in owed.values())
    applied = total(results[0][0])
    for parameter, residual in owed.items():
        if residual.numel() > 1:
            applied[parameter] = applied[parameter] + residual.view_as(applied[parameter])
    steps = course(name)
    wanted, by_ddp = total([s.expected for s in steps]), total([s.by_ddp for s in steps])
    assert_each_near(applied, by_ddp, wanted, LIMIT)
