"""Who is told of a session, and how often."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from outergrad._protocols import Recorder

Recorders = Recorder | Sequence[Recorder] | None


def recorders_of(given: Recorders) -> tuple[Recorder, ...]:
    """One, several or none.

    Raises:
        TypeError: one of them has no method `record`.
    """
    if given is None:
        return ()
    several: tuple[Any, ...] = (given,)
    if isinstance(given, Sequence) and not _records(given):
        several = tuple(given)
    for recorder in several:
        if not _records(recorder):
            raise TypeError(
                f"recorder={recorder!r} has no method record(event); use og.JSONL(path), "
                f"og.TensorBoard(dir), a list of these, or an object that has one"
            )
        every, budget = getattr(recorder, "every", 1), getattr(recorder, "budget", math.inf)
        if not isinstance(every, int) or every < 1:
            raise TypeError(f"recorder={recorder!r} has every={every!r}; use 1 or more")
        if not isinstance(budget, int | float) or not budget > 0:
            raise TypeError(
                f"recorder={recorder!r} has budget={budget!r}; use a number above 0, or math.inf"
            )
    return several


def _records(recorder: object) -> bool:
    return callable(getattr(recorder, "record", None))


class Client:
    """A recorder, and what it has been told."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.every: int = getattr(recorder, "every", 1)
        self._budget: float = getattr(recorder, "budget", math.inf)
        self.allowed_s = math.inf
        self.begun = False
        self._last: tuple[int, float] | None = None

    def forget(self) -> None:
        """It is to be told of the run again."""
        self.begun, self._last = False, None

    def seconds_per_step(self, step: int) -> float | None:
        """On average since the last time."""
        last, self._last = self._last, (step, time.perf_counter())
        if last is None or step <= last[0]:
            return None
        seconds = (self._last[1] - last[1]) / (step - last[0])
        self.allowed_s = self._budget * seconds
        return seconds
