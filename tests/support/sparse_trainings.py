"""Helpers for tests of entries: what sites owe, and a training whose weights stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import outergrad as og
from low_rank import backward, batch, error, expected, model, total
from ranks import run_on_lasting_groups

SELECTS = ("threshold", "topk", "blocks", "random", "random_blocks")
SUMMED = ("random", "random_blocks")
WEIGHTS = ("0.weight", "3.weight")
"""Of the model of `low_rank`."""


def memories(session: og.Session) -> dict[str, dict[str, Tensor]]:
    """What a site remembers, by weight."""
    own = [
        state["own"]["memories"]
        for state in session._exchange.compressors.states()
        if "own" in state
    ]
    return {place.partition(" ")[0]: m for part in own for place, m in part.items()}


def owed(session: og.Session) -> dict[str, Tensor]:
    """What a site has not sent, by weight."""
    return {name: memory["unsent"].double().clone() for name, memory in memories(session).items()}


def train(
    method: Any,
    sites: int,
    steps: int,
    rows: Callable[[int, int], int] = lambda rank, step: 40,
    **options: Any,
) -> list[tuple[list[dict[str, Tensor]], dict[str, Tensor], og.Stats]]:
    """Per site, the gradients of every step, what it owes in the end, and the last step's figures.

    The weights stay as they are, so that gradients do not depend on the method.
    """
    original = model()

    def body(rank, group):
        replica = copy.deepcopy(original)
        session = og.distribute(replica, method, group=group, **options)
        found = [backward(replica, batch(rank, step, rows(rank, step))) for step in range(steps)]
        unsent, stats = owed(session), session.stats()
        session.detach()
        return found, unsent, stats

    return run_on_lasting_groups(sites, body)


def lost(results: Sequence[Any], sites: int, means: Sequence[dict[str, Tensor]]) -> float:
    """How far what was applied and what is owed are from the sum of all gradients, at most."""
    errors = []
    for name in WEIGHTS:
        applied = total(results[0][0], name)
        unsent = sum(site[1][name] for site in results).view(applied.shape) / sites
        errors.append(error(applied + unsent, total(list(means), name)))
    return max(errors)


def means_of(
    sites: int, steps: int, rows: Callable[[int, int], int] = lambda rank, step: 40
) -> list[dict[str, Tensor]]:
    """The mean gradients of the same training, in float64."""
    return [expected(sites, step, rows) for step in range(steps)]


def linear(inputs: int, outputs: int, seed: int = 0) -> nn.Linear:
    """A layer without a bias; the same for the same seed."""
    layer = nn.Linear(inputs, outputs, bias=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(outputs, inputs, generator=generator))
    return layer
