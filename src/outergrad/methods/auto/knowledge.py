"""Knowledge of the ways to share gradients: results of trials, and when to try again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outergrad.core.choosing import Outcome

Arm = tuple[int, ...]
"""A way to share the gradients: for each group of layers, the index of its method."""
_AGAIN_STEPS = 128
_MOST_DOUBLINGS = 6
_TWICE_DOUBLINGS = 2
"""Further doublings of the pause before the next trial of a way that took twice as long."""


@dataclass(frozen=True)
class Tried:
    """The last trial of one way.

    Attributes:
        step: Number of shared steps before it was decided.
        seconds: Median of its steps, at the slowest site.
        kept_seconds: Median of the steps of the kept way in the same trial.
        outcome: Outcome of the trial.
        times: Number of trials of the way since all ways were last reopened.
    """

    step: int
    seconds: float
    kept_seconds: float
    outcome: Outcome
    times: int

    @property
    def again(self) -> int:
        """First step in which the way may be tried again; the pause doubles with each trial."""
        doublings = self.times - 1 + _TWICE_DOUBLINGS * (self.outcome == Outcome.TWICE)
        return self.step + _AGAIN_STEPS * 2 ** min(doublings, _MOST_DOUBLINGS)

    def plain(self) -> list[Any]:
        """Returns the trial as JSON holds it."""
        return [self.step, self.seconds, self.kept_seconds, self.outcome.value, self.times]

    @staticmethod
    def of(plain: Any) -> Tried:
        """Rebuilds a trial from a result of `plain`."""
        step, seconds, kept_seconds, outcome, times = plain
        return Tried(step, seconds, kept_seconds, Outcome(outcome), times)


@dataclass
class Purse:
    """Time that trials may take.

    Attributes:
        share: Share of all time.
        advance: Number of steps whose time may be spent in advance.
        elapsed_s: Seconds of all steps.
        spent_s: Seconds by which trials took longer than steps without one.
    """

    share: float
    advance: float = 8.0
    elapsed_s: float = 0.0
    spent_s: float = 0.0

    def affords(self, seconds: float, step_s: float) -> bool:
        """True if `seconds` may be spent on a trial, where a step takes `step_s`."""
        return self.spent_s + seconds <= self.share * self.elapsed_s + self.advance * step_s


@dataclass
class Knowledge:
    """Knowledge of all ways in one session.

    Attributes:
        tried: Last trial of each way.
    """

    tried: dict[Arm, Tried] = field(default_factory=dict)

    def note(self, arm: Arm, step: int, seconds: float, kept: float, outcome: Outcome) -> Tried:
        """Records the result of a trial."""
        found = Tried(step, seconds, kept, outcome, self.times(arm) + 1)
        self.tried[arm] = found
        return found

    def times(self, arm: Arm) -> int:
        """Returns the number of trials of a way since all ways were last reopened."""
        return self.tried[arm].times if arm in self.tried else 0

    def took_more_s(self, arm: Arm) -> float:
        """Returns the extra seconds per step in the last trial of the way; 0 without one."""
        tried = self.tried.get(arm)
        return 0.0 if tried is None else tried.seconds - tried.kept_seconds

    def due(self, arm: Arm, step: int) -> bool:
        """True if the way may be tried in a step."""
        return arm not in self.tried or self.tried[arm].again <= step

    def reopen(self) -> None:
        """Forgets all trials: step times have changed, so that the results do not hold any more."""
        self.tried.clear()

    def renamed(self, translate: Callable[[Arm], Arm]) -> None:
        """Renames the ways by `translate`, which merges those that have become equal."""
        self.tried = {translate(arm): tried for arm, tried in self.tried.items()}
