"""What the rules share."""

from __future__ import annotations

from torch import Tensor, nn


def is_plain(module: nn.Module, *names: str) -> bool:
    """Whether these parameters are the module's own leaves, not computed from others.

    `weight_norm` and the other parametrisations replace them by computed tensors.
    """
    return all(isinstance(vars(module)["_parameters"].get(name), nn.Parameter) for name in names)


def join(prefix: str, name: str) -> str:
    """The full name of a child; the root module's name is empty."""
    return f"{prefix}.{name}" if prefix else name


def detached(parameter: Tensor | None) -> Tensor | None:
    """The same values without the graph: autograd then computes no weight gradient."""
    return None if parameter is None else parameter.detach()


def rows_of(t_N_: Tensor, width: int) -> Tensor:
    """Flattens (..., width) to one group of rows, (1, N, width)."""
    return t_N_.reshape(1, -1, width)
