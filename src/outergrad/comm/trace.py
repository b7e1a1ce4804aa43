"""Traces of a step: its computing time and its collectives, in program order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from outergrad.comm.cost import Collective
from outergrad.core.cost import Traffic


@dataclass(frozen=True)
class Started:
    """The event that a collective was started.

    Attributes:
        at_s: Seconds that the site had computed by then.
        collective: Its kind.
        traffic: Payload of this site.
        total: Payload of all sites together.
        is_expected: Whether its receives were posted a step before.
    """

    at_s: float
    collective: Collective
    traffic: Traffic
    total: Traffic
    is_expected: bool = False


@dataclass(frozen=True)
class Awaited:
    """The event that the training thread waits for the result of a collective.

    Attributes:
        at_s: Seconds that the site had computed by then.
        index: Index of the collective, in the order in which they were started.
    """

    at_s: float
    index: int


@dataclass(frozen=True)
class Trace:
    """The trace of one step of one site.

    Attributes:
        events: Collectives started and awaited, in order.
        compute_s: Seconds that the site computed in all, without waiting.
    """

    events: tuple[Started | Awaited, ...]
    compute_s: float

    @property
    def messages(self) -> list[Started]:
        """The collectives that were started, in order."""
        return [event for event in self.events if isinstance(event, Started)]


class Tracer:
    """Records one step after another, on a clock that can be stopped."""

    def __init__(self) -> None:
        self._since: float | None = None
        self.begin()

    def begin(self) -> None:
        """Begins a step."""
        self._events: list[Started | Awaited] = []
        self._computed_s, self._since = 0.0, time.perf_counter()

    def end(self) -> Trace:
        """Returns the trace of the step that began last."""
        return Trace(tuple(self._events), self._now_s())

    @contextmanager
    def away(self) -> Iterator[None]:
        """Stops the clock for work that stands for the network, and is not the site's own."""
        self._computed_s, self._since = self._now_s(), None
        yield
        self._since = time.perf_counter()

    def started(
        self,
        collective: Collective,
        traffic: Traffic,
        total: Traffic,
        *,
        is_expected: bool = False,
    ) -> int:
        """Records that a collective was started; returns its index."""
        index = sum(isinstance(event, Started) for event in self._events)
        self._events.append(Started(self._now_s(), collective, traffic, total, is_expected))
        return index

    def awaited(self, index: int) -> None:
        """Records that the training thread waits for the result of a collective."""
        self._events.append(Awaited(self._now_s(), index))

    def _now_s(self) -> float:
        if self._since is None:
            return self._computed_s
        return self._computed_s + time.perf_counter() - self._since
