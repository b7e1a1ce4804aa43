"""Names of the parameters of an optimizer's group, and the refusal of sparse gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def called(group: Mapping[str, Any], k: int) -> str:
    """Returns the name of a group's parameter, or its number where names were not given."""
    names = group.get("param_names")
    return names[k] if names else f"parameter {k} of a group"


def refuse_sparse(optimizer: str, group: Mapping[str, Any]) -> None:
    """Raises RuntimeError that names a parameter whose gradient is a sparse tensor."""
    for k, p in enumerate(group["params"]):
        if p.grad is not None and p.grad.is_sparse:
            raise RuntimeError(
                f"{optimizer}: {called(group, k)} has a sparse gradient; build its nn.Embedding "
                f"with sparse=False, or give it to an optimizer of its own"
            )
