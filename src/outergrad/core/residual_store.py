"""Residuals of a method (error feedback): kept between steps, transferred, saved and loaded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from outergrad.core.types import Gradient, Inheritance, Place, Slot, StateDict, Unit


class ResidualStore(Protocol):
    """The residuals of a compressor; the default methods are those of one that keeps none.

    The residual of a slot is the part of its gradients that was not sent. Error feedback sends it
    later. All changes made during a step take effect at `commit`.
    """

    def residual(self, slot: Slot) -> Gradient | None:
        """Returns the slot's residual of the steps so far; None where none is kept."""
        return None

    def commit(self, *, applied: bool) -> None:
        """Ends the step: keeps the changes of `compress` if it was applied, else drops them."""

    def keep_before(self, places: Collection[Place]) -> None:
        """Keeps the former residuals of places whose last gradients the loop may still drop.

        `decide` is called once it is known whether they were used. The gradients of all other
        places count as used.
        """

    def decide(self, places: Collection[Place], *, used: bool) -> None:
        """Resolves `keep_before` once it is known whether these places' gradients were used.

        Args:
            places: of slots.
            used: if False, the residuals from before the gradients are restored. A store that no
                longer has these lets the gradients count.
        """

    def remembers(self, unit: Unit) -> bool:
        """True if the store keeps the unsent part of the unit's gradients and sends it later."""
        return False

    def hand_over(self, slots: Sequence[Slot]) -> dict[Slot, Gradient]:
        """Removes and returns the residuals of these slots; called between two steps."""
        return {}

    def take_over(self, slot: Slot, residual: Gradient) -> None:
        """Adopts the residual of another store, for a unit that this one remembers."""

    def state(self) -> StateDict:
        """Returns the state between two steps, for `load`."""
        return {}

    def load(self, inheritance: Inheritance) -> None:
        """Restores saved states, in place of the current residuals."""
