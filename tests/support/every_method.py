"""A case by every kind of method, over some steps, against the pooled reference and beside DDP."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

import outergrad as og
from cases import METHODS, Case, in_turn, pooled, relative_error, run
from ranks import run_on_lasting_groups

STEPS = 3
ALONE = {name: METHODS[name] for name in ("dad forced", "edad raw forced", "rank-dad, full rank")}
"""What is not plain autograd on a single site."""


def train(case: Case, method: Any, rank: int, group: Any) -> list[dict[str, Tensor | None]]:
    """The gradients of every step."""
    model, found = copy.deepcopy(case.model), []
    session = og.distribute(model, method, group=group)
    for _ in range(STEPS):
        model.zero_grad()
        run(model, case, case.batches[rank]).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    session.detach()
    return found


def by_ddp(case: Case, rank: int, group: Any) -> dict[str, Tensor | None]:
    """What PyTorch's own DDP leaves."""
    model = copy.deepcopy(case.model)
    wrapped = nn.parallel.DistributedDataParallel(
        model, process_group=group, find_unused_parameters=True
    )
    run(wrapped, case, case.batches[rank]).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_exact(case: Case, sites: int, number: int) -> None:
    """In every step; a first one with taps, and what follows from it.

    The number is of the case among those beside it: they take turns with methods of one kind.
    """
    expected, methods = pooled(case, sites), ALONE if sites == 1 else in_turn(number)

    def body(rank, group):
        peer = by_ddp(case, rank, group)
        return peer, {label: train(case, method, rank, group) for label, method in methods.items()}

    for rank, (peer, found) in enumerate(run_on_lasting_groups(sites, body)):
        for label, steps in found.items():
            for k, gradients in enumerate(steps):
                for name, gradient in gradients.items():
                    error = relative_error(gradient, expected[name])
                    beside = relative_error(peer[name], expected[name])
                    where = f"{label}, rank {rank}, step {k}, {name}"
                    assert error < max(5e-6, 2 * beside), f"{where}: {error:.1e}, {beside:.1e}"
