"""Usual time of steps without a trial, and detection of its changes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from outergrad.methods.auto.stretches import QUIET_STEPS

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
