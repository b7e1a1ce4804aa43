"""Usual time of steps without a trial, and detection of its changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb, inf
from statistics import median
from typing import Any

from outergrad.methods.auto.knowledge import Arm

RISK = 0.01
"""Largest probability that the lower bound is too high."""


def lower_bound(gains: Sequence[float]) -> float:
    """Returns a lower bound of the median gain, whatever the distribution; -inf of too few gains.

    By order statistics: if the median were below the k-th smallest of n, at most k - 1 of n tosses
    of a fair coin would have been heads.
    """
    tosses, below, k = len(gains), 0.0, 0
    while (below := below + comb(tosses, k) / 2**tosses) <= RISK:
        k += 1
    return sorted(gains)[k - 1] if k else -inf


def slowest_site(seconds_SN: Sequence[Sequence[float]]) -> Sequence[float]:
    """Returns the step times (N) of the site (S) whose median is longest."""
    return max(seconds_SN, key=median)


_ABBA = (*[0] * 8, *[1] * 16, *[0] * 8)
_PAIRS = (*((2 + k, 10 + k) for k in range(5)), *((26 + k, 18 + k) for k in range(5)))
"""Pairs of a step of the kept way and one of the other way, each with two steps before it and one
behind it of its own way: a change lengthens the steps around it, most if all others are alike."""
_CHANGED = (8, 9, 24, 25)
"""Two steps behind each change of way, which are planned anew."""


def turns() -> Sequence[int]:
    """Returns the way of each step of a comparison: 0 for the kept way, 1 for the other one."""
    return _ABBA


def paired_gains(seconds_N: Sequence[float]) -> list[float]:
    """Returns the seconds that the other way saves, for each pair in the steps of `turns`."""
    return [seconds_N[kept] - seconds_N[other] for kept, other in _PAIRS]


def medians(seconds_N: Sequence[float]) -> tuple[float, float]:
    """Returns the median seconds of the kept way and of the other one, over the pairs of steps."""
    kept, other = zip(*_PAIRS, strict=True)
    return median(seconds_N[k] for k in kept), median(seconds_N[k] for k in other)


def cost_of_change(seconds_N: Sequence[float]) -> float:
    """Returns by how many seconds a step behind a change is longer, from the steps of `turns`."""
    return median(seconds_N[k] for k in _CHANGED) - sum(medians(seconds_N)) / 2


def cost_of_turns(more_s: float, change_s: float) -> float:
    """Returns by how many seconds `turns` take longer than as many steps of the kept way.

    Args:
        more_s: Seconds by which a step of the other way is longer.
        change_s: Seconds by which a step behind a change is longer.
    """
    return len(_ABBA) / 2 * more_s + len(_CHANGED) * change_s


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


_DRIFT = 1.25
"""Factor by which a median must leave the range of the known ones to count as changed."""
_IN_A_ROW = 2
"""Successive medians that must have changed: one may be a pause of the machine."""
_MOST_LEVELS = 16


class Usual:
    """Usual time of a step of the kept way.

    Attributes:
        seconds: Median of the last stretch without a trial; None before it is known.
        last: Times of the last steps of that stretch, seconds.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.last: Sequence[float] = ()
        self._levels: list[float] = []
        """Medians since all ways were last reopened, which show their natural variation."""
        self._drifted = 0

    def note(self, seconds: Sequence[float]) -> float | None:
        """Records a stretch; returns the change of the step time in seconds, or None."""
        self.last, usual_s = seconds[-QUIET_STEPS:], median(seconds)
        self.seconds = usual_s
        if self._is_another(usual_s):
            self._drifted += 1
        else:
            self._drifted = 0
            self._levels = [*self._levels, usual_s][-_MOST_LEVELS:]
        if self._drifted < _IN_A_ROW:
            return None
        more_s, self._levels, self._drifted = usual_s - median(self._levels), [usual_s], 0
        return more_s

    def _is_another(self, usual_s: float) -> bool:
        if not self._levels:
            return False
        return not min(self._levels) / _DRIFT < usual_s < max(self._levels) * _DRIFT

    def forget(self) -> None:
        """Forgets all times, because another way is kept."""
        self.seconds, self._levels, self._drifted = None, [], 0

    def plain(self) -> list[Any]:
        """Returns the times as JSON holds them."""
        return [self.seconds, list(self._levels)]

    def load(self, plain: Any) -> None:
        """Restores the times from a result of `plain`."""
        self.forget()
        self.seconds, self._levels = plain[0], list(plain[1])
