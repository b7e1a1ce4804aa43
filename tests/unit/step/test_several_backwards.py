"""Optimizers whose steps call backward several times."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import outergrad as og
from cases import METHODS, mlp, relative_error
from ranks import run_on_lasting_groups

SITES = 2


def perturbed(
    model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[], Any]
) -> None:
    """Sharpness-aware: a second backward at weights that the first one has moved."""
    backward()
    params = list(model.parameters())
    norm = torch.cat([p.grad.flatten() for p in params]).norm()
    moves = [0.1 * p.grad / norm for p in params]
    with torch.no_grad():
        torch._foreach_add_(params, moves)
    backward()
    with torch.no_grad():
        torch._foreach_sub_(params, moves)
    optimizer.step()


def by_closures(
    model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[], Any]
) -> None:
    optimizer.step(backward)


LOOPS: dict[str, tuple[Any, Any]] = {
    "sharpness-aware": (lambda params: torch.optim.SGD(params, lr=0.2), perturbed),
    "lbfgs": (lambda params: torch.optim.LBFGS(params, lr=0.2, max_iter=5), by_closures),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_optimizers_that_call_backward_several_times(method, loop):
    model, (make, step) = mlp(6, 9, 5).double(), LOOPS[loop]
    batches = torch.randn(SITES, 4, 6, dtype=torch.float64)

    def train(model, batches):
        optimizer = make(model.parameters())

        def backward():
            optimizer.zero_grad()
            loss = (model(batches) - 1).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            step(model, optimizer, backward)
        return [p.detach() for p in model.parameters()]

    expected = train(copy.deepcopy(model), batches)

    def body(rank, group):
        own = copy.deepcopy(model)
        og.distribute(own, method, group=group)
        return train(own, batches[rank])

    for found in run_on_lasting_groups(SITES, body):
        for p, q in zip(found, expected, strict=True):
            assert relative_error(p, q) < 1e-8
