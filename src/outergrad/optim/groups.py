"""Helpers that optimizers share: names of parameters, checks of groups, the begin of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def called(group: Mapping[str, Any], k: int) -> str:
    """Returns the name of a group's parameter, or its number where names were not given."""
    names = group.get("param_names")
    return names[k] if names else f"parameter {k} of a group"


def check_last(optimizer: Optimizer, check: Callable[[Mapping[str, Any]], None]) -> None:
    """Checks the group that was added last, and takes it away again where the check raises."""
    try:
        check(optimizer.param_groups[-1])
    except ValueError:
        optimizer.param_groups.pop()
        raise


def check_ranges(
    optimizer: str, group: Mapping[str, Any], ranges: Mapping[str, tuple[bool, str]]
) -> None:
    """Raises ValueError that names the first setting of a group that is out of range.

    Args:
        optimizer: Name of the optimizer.
        group: The group.
        ranges: By the name of a setting, whether it holds, and what to use.
    """
    for name, (holds, wanted) in ranges.items():
        if not holds:
            raise ValueError(f"{optimizer}: {name}={group[name]!r}; use {wanted}")


def gradient(p: Tensor) -> Tensor:
    """Returns the gradient of a parameter that has one."""
    assert p.grad is not None
    return p.grad


def begin_step(optimizer: Optimizer, closure: Callable[[], float] | None) -> Any:
    """Runs the closure of a step, and refuses sparse gradients before any parameter has moved.

    Returns:
        The closure's loss; None without a closure.

    Raises:
        RuntimeError: A parameter, which it names, has a gradient that is a sparse tensor.
    """
    loss = None if closure is None else torch.enable_grad()(closure)()
    for group in optimizer.param_groups:
        _refuse_sparse(type(optimizer).__name__, group)
    return loss


def _refuse_sparse(optimizer: str, group: Mapping[str, Any]) -> None:
    """Raises RuntimeError that names a parameter whose gradient is a sparse tensor."""
    for k, p in enumerate(group["params"]):
        if p.grad is not None and p.grad.is_sparse:
            raise RuntimeError(
                f"{optimizer}: {called(group, k)} has a sparse gradient; build its nn.Embedding "
                f"with sparse=False, or give it to an optimizer of its own"
            )
