"""Groups of an optimizer: names of their parameters, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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


def refuse_sparse(optimizer: str, group: Mapping[str, Any]) -> None:
    """Raises RuntimeError that names a parameter whose gradient is a sparse tensor."""
    for k, p in enumerate(group["params"]):
        if p.grad is not None and p.grad.is_sparse:
            raise RuntimeError(
                f"{optimizer}: {called(group, k)} has a sparse gradient; build its nn.Embedding "
                f"with sparse=False, or give it to an optimizer of its own"
            )
