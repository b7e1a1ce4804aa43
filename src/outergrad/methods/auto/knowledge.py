"""What is known of ways to share the gradients: what trials took, and when to try again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outergrad.core.choosing import Outcome

Arm = tuple[int, ...]
"""A way: for each group of layers, which method."""
_AGAIN_STEPS = 128
_MOST_DOUBLINGS = 6
_TWICE_DOUBLINGS = 2
"""What took twice as long is tried again only so many times later."""


@dataclass(frozen=True)
class Tried:
    """The last trial of one way.

    Attributes:
        step: shared steps before it was decided.
        seconds: median of its steps, at the slowest site.
        kept_seconds: the same of the way beside which it was tried.
        outcome: what came of it.
        times: how often it has been tried since everything was last open.
    """

    step: int
    seconds: float
    kept_seconds: float
    outcome: Outcome
    times: int

    @property
    def again(self) -> int:
        """The step from which on it may be tried again: seldom, where that led to nothing."""
        doublings = self.times - 1 + _TWICE_DOUBLINGS * (self.outcome == Outcome.TWICE)
        return self.step + _AGAIN_STEPS * 2 ** min(doublings, _MOST_DOUBLINGS)

    def plain(self) -> list[Any]:
        """As JSON holds it."""
        return [self.step, self.seconds, self.kept_seconds, self.outcome.value, self.times]

    @staticmethod
    def of(plain: Any) -> Tried:
        """The inverse of `plain`."""
        step, seconds, kept_seconds, outcome, times = plain
        return Tried(step, seconds, kept_seconds, Outcome(outcome), times)


@dataclass
class Purse:
    """The time that trials may take.

    Attributes:
        share: of all time.
        advance: steps that may be spent before they were earned.
        elapsed_s: of all steps.
        spent_s: what trials took longer than steps without.
    """

    share: float
    advance: float = 8.0
    elapsed_s: float = 0.0
    spent_s: float = 0.0

    def affords(self, seconds: float, step_s: float) -> bool:
        """Whether so much may be spent, where a step takes so long."""
        return self.spent_s + seconds <= self.share * self.elapsed_s + self.advance * step_s


@dataclass
class Knowledge:
    """Of all ways in one session.

    Attributes:
        tried: the last trial of each.
    """

    tried: dict[Arm, Tried] = field(default_factory=dict)

    def note(self, arm: Arm, step: int, seconds: float, kept: float, outcome: Outcome) -> Tried:
        """A trial is over."""
        found = Tried(step, seconds, kept, outcome, self.times(arm) + 1)
        self.tried[arm] = found
        return found

    def times(self, arm: Arm) -> int:
        """How often it has been tried since everything was last open."""
        return self.tried[arm].times if arm in self.tried else 0

    def took_more_s(self, arm: Arm) -> float:
        """How much longer its steps took in the last trial than those beside it; 0 of none."""
        tried = self.tried.get(arm)
        return 0.0 if tried is None else tried.seconds - tried.kept_seconds

    def due(self, arm: Arm, step: int) -> bool:
        """Whether it may be tried in a step."""
        return arm not in self.tried or self.tried[arm].again <= step

    def reopen(self) -> None:
        """Steps take another time than they did: what trials took says nothing any more."""
        self.tried.clear()

    def renamed(self, translate: Callable[[Arm], Arm]) -> None:
        """Ways that have become the same are one."""
        self.tried = {translate(arm): tried for arm, tried in self.tried.items()}
