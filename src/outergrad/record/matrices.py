"""Gradients of parameters as matrices that can be decomposed."""

from __future__ import annotations

from torch import Tensor

from outergrad.core.types import Slot


def whole(name: str, mean: Tensor) -> list[Slot]:
    """Returns a parameter without known slots as one matrix; a vector has one row."""
    outputs = mean.shape[0] if mean.dim() > 1 else 1
    return [Slot("", name, outputs, mean.numel() // max(outputs, 1))]


def matrix_of(slot: Slot, gradient: Tensor) -> Tensor:
    """Returns the slot's part of a gradient, (G, O, I)."""
    start, stop = slot.weight_rows or (0, gradient.shape[0] if gradient.dim() else 1)
    part = gradient if gradient.dim() == 0 else gradient[start:stop]
    return part.reshape(slot.groups, slot.outputs, slot.inputs)


def used_rows(table_1IO: Tensor) -> Tensor:
    """Returns the rows of a table that are not zero, which have the same singular values."""
    used = table_1IO[0].any(dim=1)
    return table_1IO[:, used] if bool(used.any()) else table_1IO[:, :1]
