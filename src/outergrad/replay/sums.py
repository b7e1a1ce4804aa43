"""Gradients of several runs together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor


def summed(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """By name, in the order of the parts: so every site rounds alike."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, gradient in part.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total
