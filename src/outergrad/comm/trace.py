"""What a step computes and exchanges, in the order of the program."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from outergrad.comm.cost import Collective
from outergrad.core.cost import Traffic


@dataclass(frozen=True)
class Started:
    """A collective was started.

    Attributes:
        at_s: Seconds that the site had computed by then.
        collective: Which.
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
    """The training thread cannot go on without the result of a collective.

    Attributes:
        at_s: Seconds that the site had computed by then.
        index: Of the collective, in the order in which they were started.
    """

    at_s: float
    index: int


@dataclass(frozen=True)
class Trace:
    """One step of one site.

    Attributes:
        events: What it exchanged, in order.
        compute_s: Seconds that it computed in all, none of them spent on waiting.
    """

    events: tuple[Started | Awaited, ...]
    compute_s: float

    @property
    def messages(self) -> list[Started]:
        """The collectives, in order."""
        return [event for event in self.events if isinstance(event, Started)]


class Tracer:
    """Takes down one step after another, on a clock that can be stopped."""

    def __init__(self) -> None:
        self._since: float | None = None
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._events: list[Started | Awaited] = []
        self._computed_s, self._since = 0.0, time.perf_counter()

    def end(self) -> Trace:
        """The step that began last is over."""
        return Trace(tuple(self._events), self._now_s())

    @contextmanager
    def away(self) -> Iterator[None]:
        """Seconds inside are not counted: what is done there is not the site's work."""
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
        """Takes down that a collective was started; returns its index."""
        index = sum(isinstance(event, Started) for event in self._events)
        self._events.append(Started(self._now_s(), collective, traffic, total, is_expected))
        return index

    def awaited(self, index: int) -> None:
        """Takes down that its result is needed."""
        self._events.append(Awaited(self._now_s(), index))

    def _now_s(self) -> float:
        if self._since is None:
            return self._computed_s
        return self._computed_s + time.perf_counter() - self._since
