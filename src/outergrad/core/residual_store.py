"""What a method has not sent: kept from step to step, handed on, saved and loaded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from outergrad.core.types import Gradient, Inheritance, Place, Slot, StateDict, Unit


class ResidualStore(Protocol):
    """What a method remembers of the steps until now; as it stands here, nothing.

    The residual of a slot is what has not been sent of its gradients: error feedback sends it
    later. All that changes in a step holds from `commit` on.
    """

    def residual(self, slot: Slot) -> Gradient | None:
        """What it has not sent of the gradients of the steps until now, if it remembers that."""
        return None

    def commit(self, *, applied: bool) -> None:
        """The step is over: what `compress` left for the next one holds, or is void."""

    def keep_before(self, places: Collection[Place]) -> None:
        """The gradients of the last step that counts may yet be thrown away, of these places.

        `decide` says of each what became of them. All others are used.
        """

    def decide(self, places: Collection[Place], *, used: bool) -> None:
        """What became of the gradients of these is known.

        Args:
            places: of slots.
            used: whether the gradients were used; if not, what was not sent before them holds
                again. A store that does not know that any more lets them count.
        """

    def remembers(self, unit: Unit) -> bool:
        """Whether it keeps what it does not send of a unit, and sends it later."""
        return False

    def hand_over(self, slots: Sequence[Slot]) -> dict[Slot, Gradient]:
        """Forgets what it has not sent of these, and returns it; between two steps."""
        return {}

    def take_over(self, slot: Slot, residual: Gradient) -> None:
        """Goes on with what another one has not sent; of a unit that it remembers."""

    def state(self) -> StateDict:
        """What it remembers between two steps; `load` takes it back."""
        return {}

    def load(self, inheritance: Inheritance) -> None:
        """Goes on from what was saved, and forgets what it remembers now."""
