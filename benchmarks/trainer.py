"""One training step of a model under a method, as both benchmarks take it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from methods import METHODS
from models import TASKS


def trainer(task_name: str, method: str, rank: int) -> Callable[[], None]:
    """Builds a model under a method and returns its training step on one batch.

    Every method starts from the same weights, and every site has a batch of its own.
    The gradients are global when ``backward()`` returns.
    """
    torch.manual_seed(0)
    task = TASKS[task_name]
    model = METHODS[method](task.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, labels = task.batch(torch.Generator().manual_seed(rank))

    def step() -> None:
        optimizer.zero_grad()
        task.loss(model(x), labels).backward()
        optimizer.step()

    return step
