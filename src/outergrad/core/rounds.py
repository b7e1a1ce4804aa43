"""What methods do between the rounds of a step: sums of sketches, and merging at an owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from outergrad.core.payload import Arrived
from outergrad.core.types import Factors, Gradient, Slot


class Sketches(Protocol):
    """Few linear functions of a gradient that no site has: sums over the sites.

    A step of a slot is `begin`, `turn`, `end`, with an all-reduce after each of the first two; of
    one round, `begin` and `end`.
    """

    rounds: Literal[1, 2] = 2
    """How many all-reduces a step takes."""

    def columns(self, slot: Slot) -> int:
        """K, the width of the sketches in this step; the same on all sites."""
        ...

    def shape(self, slot: Slot) -> tuple[int, ...]:
        """Of the first sketch: of thin matrices (G, O, K)."""
        return slot.groups, slot.outputs, self.columns(slot)

    def shape_ahead(self, slot: Slot) -> tuple[int, ...]:
        """What `shape` will be in the next step, as far as can be told, if this one counts."""
        return self.shape(slot)

    def projection(self, slot: Slot, sketch: Tensor) -> Tensor:
        """This site's gradient along orthonormal directions, from its part of the last sketch."""
        return sketch

    def begin(self, slot: Slot, gradient: Gradient) -> Tensor:
        """This site's part of the first sketch: of thin matrices `dW Q`."""
        ...

    def turn(self, slot: Slot, y_GOK: Tensor) -> Tensor:
        """This site's part `dWᵀ P` of the second sketch, of any shape, from the first's sum.

        Not called where there is one round.
        """
        return y_GOK

    def end(self, slot: Slot, z: Tensor, sites: int) -> Arrived:
        """The mean gradient, from the sum of the last sketch."""
        ...


class Merger(Protocol):
    """Rows of several sites into as few as one site sends."""

    def owner(self, slot: Slot) -> int | None:
        """The site that merges it in this step; None if it is one for good, as the plan says."""
        return None

    def merged_rows(self, slot: Slot, rows_S: Sequence[int]) -> int:
        """R of the merged rows, from what every site sends; none from none."""
        ...

    def merge(self, slot: Slot, parts: Sequence[Factors], rows: int, sites: int) -> Factors:
        """The mean over the sites, of which those without rows are not among the parts.

        What does not go into so many rows is kept for the next step.
        """
        ...
