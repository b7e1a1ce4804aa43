"""Recorders of a session, their pace, and their closing at the end of the program."""

from __future__ import annotations

import atexit
import logging
import math
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import ref

from outergrad.core.protocols import Recorder
from outergrad.record.stats import Stats


def warn(message: str) -> None:
    """Warns; logs where warnings are errors, since raising would leave other sites waiting."""
    try:
        warnings.warn(message, stacklevel=3)
    except Warning:
        logging.getLogger("outergrad").warning(message)


Recorders = Recorder | Sequence[Recorder] | None


def recorders_of(given: Recorders) -> tuple[Recorder, ...]:
    """Returns the recorders as a tuple, from one, several or none.

    Raises:
        TypeError: a recorder is a class, lacks the method `record`, or has an invalid setting.
    """
    if given is None:
        return ()
    if isinstance(given, str | Path):
        raise TypeError(f"recorder={str(given)!r}: pass a recorder, as og.JSONL({str(given)!r})")
    several: tuple[Any, ...] = (given,)
    if isinstance(given, Sequence) and not _records(given):
        several = tuple(given)
    for recorder in several:
        if isinstance(recorder, type):
            raise TypeError(
                f"recorder is the class {recorder.__name__}: pass an object, as "
                f"og.{recorder.__name__}(...)"
            )
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


class Pace(NamedTuple):
    """Average seconds per step since the last recorded one; fields as in `events.Step`."""

    seconds: float | None
    compress_s: float
    replay_s: float
    wait_s: float


class Client:
    """A recorder, with its settings and its progress."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.every: int = getattr(recorder, "every", 1)
        self._budget: float = getattr(recorder, "budget", math.inf)
        self.samples: bool = getattr(recorder, "samples", False) is True
        self.groups: bool = getattr(recorder, "groups", False) is True
        self.allowed_s = math.inf
        self.begun = False
        self._last: tuple[int, float] | None = None
        self._spent: list[tuple[float, float, float]] = []

    def forget(self) -> None:
        """Resets it for a new run."""
        self.begun, self._last = False, None
        self._spent.clear()

    def spend(self, stats: Stats) -> None:
        """Adds the seconds of a step, recorded or not."""
        self._spent.append((stats.compress_s, stats.replay_s, stats.wait_s))

    def pace(self, step: int) -> Pace:
        """Returns averages since the last call, all over the same steps, so that parts add up."""
        last, self._last = self._last, (step, time.perf_counter())
        spent, self._spent = self._spent, []
        steps, seconds = max(len(spent), 1), None
        if last is not None and step > last[0]:
            steps = step - last[0]
            seconds = (self._last[1] - last[1]) / steps
            self.allowed_s = self._budget * seconds
        parts = [sum(column) / steps for column in zip(*spent, strict=True)] or [0.0] * 3
        return Pace(seconds, *parts)


def checked(every: int, budget: float) -> tuple[int, float]:
    """Returns the settings of a recorder.

    Raises:
        ValueError: one is out of its range.
    """
    if every < 1:
        raise ValueError(f"every={every!r}; use 1 or more: record every so many-th step")
    if not budget > 0:
        raise ValueError(f"budget={budget!r}; use a share of a step above 0, or math.inf")
    return every, budget


class Closable(Protocol):
    """Object that is closed when the program ends."""

    def close(self, error: str = "") -> None:
        """Closes it; `error` is the type of the exception that ended the program, if one did."""
        ...


class Ending:
    """Closes an object when the interpreter exits, unless it is gone or was closed before.

    Args:
        closable: the object, which is not kept alive.
    """

    def __init__(self, closable: Closable) -> None:
        self._closable = ref(closable)
        self._expected = False

    def expect(self) -> None:
        """Registers the object to be closed at exit."""
        if not self._expected:
            self._expected = True
            atexit.register(self._exit)

    def cancel(self) -> None:
        """Unregisters the object."""
        self._expected = False
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        closable = self._closable()
        if closable is not None:
            closable.close(_uncaught())


def _uncaught() -> str:
    """Type of the exception that ends the program; Python keeps it for a debugger."""
    kind = getattr(sys, "last_type", None)
    at_prompt = hasattr(sys, "ps1")  # there an exception does not end the program
    return "" if kind is None or at_prompt else kind.__name__
