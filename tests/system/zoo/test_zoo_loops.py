"""Loops that go backward several times in a step, with models that nobody here wrote."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from zoo_loops import LOOPS
from zoo_methods import EXACT, QUICK
from zoo_runs import (
    SITES,
    Note,
    assert_as_near_as_ddp,
    assert_equal_sites,
    batch_of,
    built,
    gradients_of,
    loss_of,
    mean_in_double,
    mean_of_sites,
    weights_of,
)
from zoo_table import ZOO

import outergrad as og
from covering import covering
from ranks import run_on_lasting_groups

TRAINED = {"sam": "vit", "lbfgs": "llama", "lbfgs, line search": "gcn"}

PAIRS = [
    *covering(LOOPS.keys(), sorted(QUICK)),
    *covering(LOOPS.keys(), sorted(EXACT.keys() - QUICK), quick=0, every=2),
]


def notes_of(loop: str, method: Any, rank: int, group: dist.ProcessGroup) -> list[Note]:
    """Of every backward: the step that it is of, where the weights were, and the gradients."""
    name = TRAINED[loop]
    case, model, notes = ZOO[name], copy.deepcopy(built(name)), []
    session = og.distribute(model, method, group=group)

    def backward(step: int) -> Tensor:
        model.zero_grad()
        loss = loss_of(case, model, batch_of(case, rank, step))
        loss.backward()
        notes.append(Note(step, weights_of(model), gradients_of(model)))
        return loss

    LOOPS[loop](model, backward, group)
    session.detach()
    return notes


@pytest.mark.parametrize(("loop", "method"), PAIRS)
def test_every_backward_of_a_step_leaves_the_mean_gradient(loop, method):
    """At the weights that it was made at, which the sites must have in common."""
    name = TRAINED[loop]
    case = ZOO[name]
    built(name)
    both = run_on_lasting_groups(
        SITES, lambda rank, group: notes_of(loop, EXACT[method](case), rank, group)
    )
    assert_equal_sites([[note.weights for note in notes] for notes in both])
    assert_equal_sites([[note.gradients for note in notes] for notes in both])
    assert len(both[0]) >= 2 * len({note.step for note in both[0]}) > 2
    for note in both[0]:
        expected = mean_in_double(name, note.weights, note.step)
        by_ddp = mean_of_sites(name, note.weights, note.step)
        assert_as_near_as_ddp(note.gradients, by_ddp, expected)
