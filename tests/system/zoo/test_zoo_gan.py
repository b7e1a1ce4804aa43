"""WGAN-GP: two models with a session each, and double backward in the loss of one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from wgan import LOSSES, gan, samples, turns
from zoo_runs import (
    SITES,
    Gradients,
    Note,
    assert_as_near_as_ddp,
    assert_equal_sites,
    gradients_of,
    set_weights,
    weights_of,
)

import outergrad as og
from ranks import run_on_lasting_groups

METHODS: dict[str, Any] = {
    "dense": og.Dense(),
    "powersgd": og.PowerSGD(rank=1000),
    "dad": og.DAD(),
    "dad forced": og.DAD(always=True),
    "dad raw forced": og.DAD(always=True, reveal="activations"),
    "rank-dad": og.RankDAD(rank=1000, reduce="gather"),
    "sparse": og.Sparse(density=1.0, always=True),
    "edad": og.EDAD(always=True),
}
"""Those that leave the backward of every layer as it is, and those that tap layers."""


def notes_of(method: Any, rank: int, group: dist.ProcessGroup) -> list[Note]:
    models = copy.deepcopy(gan())
    optimizers = {name: torch.optim.SGD(m.parameters(), lr=0.02) for name, m in models.items()}
    sessions = [og.distribute(model, method, group=group) for model in models.values()]
    notes = []
    for learns, step in turns():
        models.zero_grad()
        LOSSES[learns](models, samples(rank, step)).backward()
        notes.append(Note(step, weights_of(models), gradients_of(models)))
        optimizers[learns].step()
    for session in sessions:
        session.detach()
    return notes


def mean_gradients(models: nn.ModuleDict, learns: str, note: Note, dtype: torch.dtype) -> Gradients:
    """Of the sites, at the weights of a note, without any of our code."""
    set_weights(models, note.weights)
    for site in range(SITES):
        x = samples(site, note.step)
        x = x.double() if dtype is torch.float64 else x
        (LOSSES[learns](models, x) / SITES).backward()
    return gradients_of(models)


@pytest.mark.parametrize("method", METHODS)
def test_both_models_get_the_mean_gradients(method):
    both = run_on_lasting_groups(SITES, lambda rank, group: notes_of(METHODS[method], rank, group))
    assert_equal_sites([[note.gradients for note in notes] for notes in both])
    for (learns, _), note in zip(turns(), both[0], strict=True):
        expected = mean_gradients(gan().double(), learns, note, torch.float64)
        by_ddp = mean_gradients(gan(), learns, note, torch.float32)
        assert_as_near_as_ddp(note.gradients, by_ddp, expected)
