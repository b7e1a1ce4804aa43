"""Computations of methods between message rounds: sums of sketches, and merging at an owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from outergrad.core.payload import Arrived
from outergrad.core.types import Factors, Gradient, Slot


class Sketches(Protocol):
    """A few linear functions (sketches) of the mean gradient, computed as sums over the sites.

    A step of a slot calls `begin`, `turn` and `end`, with an all-reduce after each of the first
    two. With one round it calls `begin` and `end`, with an all-reduce between them.
    """

    rounds: Literal[1, 2] = 2
    """Number of all-reduces per step."""

    def columns(self, slot: Slot) -> int:
        """K, the width of the sketches in this step; the same on all sites."""
        ...

    def shape(self, slot: Slot) -> tuple[int, ...]:
        """Shape of the first sketch; (G, O, K) for thin matrices."""
        return slot.groups, slot.outputs, self.columns(slot)

    def shape_ahead(self, slot: Slot) -> tuple[int, ...]:
        """Predicts `shape` in the next step, if this one counts."""
        return self.shape(slot)

    def projection(self, slot: Slot, sketch: Tensor) -> Tensor:
        """Returns this site's gradient along orthonormal directions, from its last sketch."""
        return sketch

    def begin(self, slot: Slot, gradient: Gradient) -> Tensor:
        """Returns this site's part of the first sketch; `dW Q` for thin matrices."""
        ...

    def turn(self, slot: Slot, y_GOK: Tensor) -> Tensor:
        """Returns this site's part `dWᵀ P` of the second sketch, from the sum of the first.

        It may have any shape. Not called where there is one round.
        """
        return y_GOK

    def end(self, slot: Slot, z: Tensor, sites: int) -> Arrived:
        """Returns the mean gradient, from the sum of the last sketch."""
        ...


class Merger(Protocol):
    """Merges rows of several sites into as many rows as a single site sends."""

    def owner(self, slot: Slot) -> int | None:
        """Returns the site that merges the slot in this step; None for the plan's fixed owner."""
        return None

    def merged_rows(self, slot: Slot, rows_S: Sequence[int]) -> int:
        """R of the merged rows, from the row count of every site; 0 if all are 0."""
        ...

    def merge(self, slot: Slot, parts: Sequence[Factors], rows: int, sites: int) -> Factors:
        """Returns the mean over `sites` sites as factors of so many rows.

        `parts` has no factors of sites without rows. With error feedback, the lost part of the mean
        is kept for the next step.
        """
        ...
