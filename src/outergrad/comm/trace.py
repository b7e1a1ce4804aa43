"""Traces of a step: its computing time and its collectives, in program order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

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
        processor_s: Seconds of these in which the training thread had a processor; nearly all of
            them, unless other programs had it.
    """

    events: tuple[Started | Awaited, ...]
    compute_s: float
    processor_s: float

    @property
    def messages(self) -> list[Started]:
        """The collectives that were started, in order."""
        return [event for event in self.events if isinstance(event, Started)]

    def as_if(self, compute_s: float) -> Trace:
        """Returns the trace of a site that computes the same in other time."""
        pace = compute_s / self.compute_s if self.compute_s else 1.0
        events = tuple(replace(event, at_s=pace * event.at_s) for event in self.events)
        return Trace(events, compute_s, min(self.processor_s, compute_s))


class _Stopwatch:
    """A clock that can be stopped."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._before_s = clock, 0.0
        self._since: float | None = clock()

    @property
    def now_s(self) -> float:
        """Seconds that it has run."""
        running_s = 0.0 if self._since is None else self._clock() - self._since
        return self._before_s + running_s

    def stop(self) -> None:
        """Stops it."""
        self._before_s, self._since = self.now_s, None

    def go_on(self) -> None:
        """Starts it again."""
        self._since = self._clock()


class Tracer:
    """Records one step after another, on clocks that can be stopped.

    Args:
        clock: Clock that goes on while another program has the processor.
        processor: Clock that does not.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clocks = clock, processor
        self.begin()

    def begin(self) -> None:
        """Begins a step."""
        self._events: list[Started | Awaited] = []
        self._all, self._processor = map(_Stopwatch, self._clocks)

    def end(self) -> Trace:
        """Returns the trace of the step that began last."""
        compute_s = self._all.now_s
        return Trace(tuple(self._events), compute_s, min(self._processor.now_s, compute_s))

    @contextmanager
    def away(self) -> Iterator[None]:
        """Stops the clocks for work that stands for the network, and is not the site's own."""
        self._all.stop()
        self._processor.stop()
        yield
        self._processor.go_on()
        self._all.go_on()

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
        self._events.append(Started(self._all.now_s, collective, traffic, total, is_expected))
        return index

    def awaited(self, index: int) -> None:
        """Records that the training thread waits for the result of a collective."""
        self._events.append(Awaited(self._all.now_s, index))
