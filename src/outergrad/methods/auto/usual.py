"""How long steps take without a trial, and whether that is another time than it was."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from outergrad.methods.auto.stretches import QUIET_STEPS

_DRIFT = 1.25
"""So many times as long as ever, or as short, is another time."""
_IN_A_ROW = 2
"""Medians that must say so: one may be a pause of the machine's."""
_MOST_LEVELS = 16


class Usual:
    """Of the way that is kept.

    Attributes:
        seconds: the median of the last stretch without a trial; None before it is known.
        last: the last steps of it.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.last: Sequence[float] = ()
        self._levels: list[float] = []
        """The medians since everything was last open: how much they differ by themselves."""
        self._drifted = 0

    def note(self, seconds: Sequence[float]) -> float | None:
        """Takes in a stretch; by how much steps have become longer, if they take another time."""
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
        """Another way is kept."""
        self.seconds, self._levels, self._drifted = None, [], 0

    def plain(self) -> list[Any]:
        """As JSON holds it."""
        return [self.seconds, list(self._levels)]

    def load(self, plain: Any) -> None:
        """The inverse of `plain`."""
        self.forget()
        self.seconds, self._levels = plain[0], list(plain[1])
