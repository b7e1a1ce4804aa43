"""Whose a parameter is."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Claim:
    """A hook of a parameter: marks it as a session's, which lives as long as the model so.

    Args:
        parameter: requires a gradient.
        owner: what is kept alive.
    """

    def __init__(self, parameter: nn.Parameter, owner: Any) -> None:
        self.owner = owner
        self._handles: list[RemovableHandle] = [parameter.register_hook(self._before)]

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _before(self, gradient: Tensor | None) -> None:
        """Called before a backward accumulates a gradient; nothing to do."""


def is_claimed(p: nn.Parameter) -> bool:
    """Whether the parameter belongs to a session."""
    hooks = (p._backward_hooks or {}).values()
    return any(isinstance(getattr(hook, "__self__", None), Claim) for hook in hooks)
