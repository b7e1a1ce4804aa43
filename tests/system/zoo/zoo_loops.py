"""Training loops that go backward more than once in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS = 2

Backward = Callable[[int], Tensor]
"""Makes the gradients of a step's batch, from zero, and returns the loss."""

Loop = Callable[[nn.Module, Backward, dist.ProcessGroup], Any]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def lbfgs(model: nn.Module, backward: Backward, group: dist.ProcessGroup) -> None:
    """Calls its closure several times."""
    optimizer = torch.optim.LBFGS(trained(model), lr=0.1, max_iter=3, history_size=3)
    for step in range(STEPS):
        optimizer.step(lambda step=step: backward(step))


def lbfgs_with_line_search(model: nn.Module, backward: Backward, group: dist.ProcessGroup) -> None:
    """Goes by the loss, too: all sites need the same one, as they do under DDP."""
    settings = {"max_iter": 3, "history_size": 3, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(trained(model), **settings)

    def closure(step: int) -> Tensor:
        loss = backward(step).detach().clone()
        group.allreduce([loss]).wait()
        return loss / group.size()

    for step in range(STEPS):
        optimizer.step(lambda step=step: closure(step))


def sam(model: nn.Module, backward: Backward, group: dist.ProcessGroup) -> None:
    """Sharpness-aware: the gradient that counts is that of weights a little uphill.

    Source: Foret et al., arXiv 2010.01412, algorithm 1.
    """
    optimizer = torch.optim.SGD(trained(model), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        backward(step)
        with uphill(model, 0.05):
            backward(step)
        optimizer.step()


@contextmanager
def uphill(model: nn.Module, distance: float) -> Iterator[None]:
    """Inside, the weights are moved along their gradients; afterwards they are where they were."""
    moved = [p for p in trained(model) if p.grad is not None]
    scale = distance / torch.stack([p.grad.norm() for p in moved]).norm()
    before = [p.detach().clone() for p in moved]
    with torch.no_grad():
        for p in moved:
            p.add_(p.grad, alpha=scale.item())
    yield
    with torch.no_grad():
        for p, old in zip(moved, before, strict=True):
            p.copy_(old)


LOOPS: dict[str, Loop] = {"lbfgs": lbfgs, "lbfgs, line search": lbfgs_with_line_search, "sam": sam}
