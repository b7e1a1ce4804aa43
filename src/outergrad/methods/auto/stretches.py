"""Stretches of steps, after each of which all sites send each other their step times."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from outergrad.methods.auto.gains import turns
from outergrad.methods.auto.knowledge import Arm

FIRST_STEPS = 4
"""Steps of the first stretch, which announce their rows and take longer than others."""
QUIET_STEPS = 16
"""Steps without a trial that give the usual time, where it is not known yet."""
SETTLED_STEPS = 64
GLANCE_STEPS = 3
"""Steps of a glance at a new way: two have headers, the last one is as later steps would be."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps.

    Attributes:
        first: Number of the first step.
        arms: Way of each step.
        tried: Way that is tried in these steps, if any.
    """

    first: int
    arms: tuple[Arm, ...]
    tried: Arm | None = None

    @cached_property
    def end(self) -> int:
        """Number of the step behind the last one."""
        return self.first + len(self.arms)

    @property
    def is_glance(self) -> bool:
        """True if the stretch is a glance, the short first part of a trial."""
        return self.tried is not None and len(self.arms) == GLANCE_STEPS

    @staticmethod
    def quiet(first: int, kept: Arm, *, settled: bool) -> Stretch:
        """Returns steps without a trial."""
        return Stretch(first, (kept,) * (SETTLED_STEPS if settled else QUIET_STEPS))

    @staticmethod
    def glance(first: int, arm: Arm) -> Stretch:
        """Returns a glance at a way."""
        return Stretch(first, (arm,) * GLANCE_STEPS, arm)

    @staticmethod
    def turns(first: int, kept: Arm, arm: Arm) -> Stretch:
        """Returns steps in which the kept way and another one take turns."""
        return Stretch(first, tuple(arm if other else kept for other in turns()), arm)
