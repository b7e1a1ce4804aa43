"""Steps that all sites tell each other of when they are over."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from outergrad.methods.auto.gains import turns
from outergrad.methods.auto.knowledge import Arm

FIRST_STEPS = 4
"""That tell the rows, and are longer than others."""
QUIET_STEPS = 16
"""That say what is usual, where that is not known."""
SETTLED_STEPS = 64
GLANCE_STEPS = 3
"""Of a new way: two have headers, the last one is as those that would follow."""


@dataclass(frozen=True)
class Stretch:
    """Steps in a row.

    Attributes:
        first: number of the first.
        arms: how the gradients travel in each.
        tried: the way that is tried in them, if one is.
    """

    first: int
    arms: tuple[Arm, ...]
    tried: Arm | None = None

    @cached_property
    def end(self) -> int:
        """The step behind the last."""
        return self.first + len(self.arms)

    @property
    def is_glance(self) -> bool:
        """Whether a way is seen for the first time in it."""
        return self.tried is not None and len(self.arms) == GLANCE_STEPS

    @staticmethod
    def quiet(first: int, kept: Arm, *, settled: bool) -> Stretch:
        """Without a trial."""
        return Stretch(first, (kept,) * (SETTLED_STEPS if settled else QUIET_STEPS))

    @staticmethod
    def glance(first: int, arm: Arm) -> Stretch:
        """At a way."""
        return Stretch(first, (arm,) * GLANCE_STEPS, arm)

    @staticmethod
    def turns(first: int, kept: Arm, arm: Arm) -> Stretch:
        """Of two ways."""
        return Stretch(first, tuple(arm if other else kept for other in turns()), arm)
