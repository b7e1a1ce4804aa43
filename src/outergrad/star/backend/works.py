"""Collectives of a process group under way, and the thread that finishes them for futures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from outergrad.core.errors import ExchangeError, Failure
from outergrad.star.arrivals import Arrival
from outergrad.star.frames import Place
from outergrad.star.line import Line, Patience

Rooms = Mapping[int, np.ndarray]
"""Bytes that have come, by sender."""
_LOOKS_S = 1.0
"""Longest time, seconds, after which a thread looks again: a wait may have become too long."""
_MOST_WATCHING = 2


class Waiting(Protocol):
    """One part of a work, for which it waits."""

    source: int
    """Rank in the group of the site that sends it; -1 where there is more than one."""

    def is_due(self, line: Line, patience_s: float) -> bool:
        """True if `take` would not wait."""
        ...

    def take(self, line: Line, patience_s: float) -> None:
        """Waits, as long as something moves, and writes what has come.

        Raises:
            ExchangeError: it will not come.
        """
        ...


@dataclass
class Awaited(Waiting):
    """The messages of one collective, and what is done with them."""

    place: Place
    arrival: Arrival
    then: Callable[[Rooms], None]
    source: int = -1
    _since: Patience = field(init=False)

    def __post_init__(self) -> None:
        """Begins to wait."""
        self._since = Patience(self.arrival)

    def is_due(self, line: Line, patience_s: float) -> bool:
        """True if all of them are there, or one will not come."""
        return line.is_due(self.place, self.arrival, patience_s, self._since)

    def is_late(self, line: Line, patience_s: float) -> bool:
        """True if one of them will not come, or has not come in time."""
        with line.changed:
            try:
                is_whole = not self.arrival.missing()
            except ExchangeError:
                return True
            return not is_whole and self.is_due(line, patience_s)

    def take(self, line: Line, patience_s: float) -> None:
        """Waits for them."""
        self.then(line.wait(self.place, self.arrival, patience_s, self._since))


class FirstOf(Waiting):
    """A message of whichever site sends one first.

    Args:
        has_come: returns the rank of a site whose message has begun to come; None of none. Raises
            if none can come.
        receive: starts to receive the message of that site.
    """

    def __init__(
        self, has_come: Callable[[], int | None], receive: Callable[[int], LineWork]
    ) -> None:
        self._has_come, self._receive = has_come, receive
        self.source, self._began = -1, time.monotonic()

    def is_due(self, line: Line, patience_s: float) -> bool:
        """True if a message has begun to come, none can come, or it is too late for one."""
        is_late = time.monotonic() - self._began > patience_s
        try:
            return is_late or line.has_failed or self._has_come() is not None
        except ExchangeError:
            return True

    def take(self, line: Line, patience_s: float) -> None:
        """Waits for the first message, and for its end."""
        line.wait_for(lambda: self.is_due(line, patience_s), patience_s)
        source = self._has_come()
        if source is None:
            raise line.failure or ExchangeError(Failure.TIMEOUT.value, kind=Failure.TIMEOUT)
        self.source = source
        self._receive(source).wait()


class LineWork(Work):
    """Messages under way on a line. Whoever waits first writes the results.

    Args:
        line: of this process.
        awaited: messages to wait for, in order.
        results: tensors that hold the result then.
        patience_s: longest time, seconds, in which nothing moves.
        finisher: finishes works whose future somebody has asked for.
    """

    def __init__(
        self,
        line: Line,
        awaited: Sequence[Waiting],
        results: Sequence[Tensor],
        patience_s: float,
        finisher: Finisher,
    ) -> None:
        super().__init__()
        self._line, self._awaited, self._results = line, list(awaited), list(results)
        self._patience_s, self._finisher = patience_s, finisher
        self._lock, self._error = threading.RLock(), None
        self._is_done, self._source = not self._awaited, -1
        self._future: torch.futures.Future[Any] | None = None

    @property
    def awaited(self) -> Sequence[Waiting]:
        """Messages that nobody has waited for yet."""
        return self._awaited

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the results are there.

        Args:
            timeout: longest time in which nothing moves; None or 0 for that of the group.

        Raises:
            ExchangeError: a message will not come; it names the site.
        """
        limit_s = timeout.total_seconds() if timeout else 0.0
        self.finish(limit_s if limit_s > 0 else self._patience_s)
        if self._error is not None:
            raise self._error
        return True

    def finish(self, patience_s: float | None = None) -> None:
        """Waits, writes the results, and sets the future; keeps an error for `wait`."""
        with self._lock:
            if self._is_done:
                return
            limit_s = patience_s or self._patience_s
            try:
                for one in self._awaited:
                    one.take(self._line, limit_s)
                    self._source = one.source
            except Exception as error:
                self._error = in_words(error, self._line, limit_s)
            self._is_done, self._awaited = True, []
            if self._future is not None:
                _set(self._future, self._results, self._error)

    def is_due(self) -> bool:
        """True if `finish` would not wait."""
        return all(one.is_due(self._line, self._patience_s) for one in self._awaited)

    def is_completed(self) -> bool:
        """True if `wait` would not wait."""
        if not self._is_done and self.is_due():
            self.finish()
        return self._is_done

    def is_success(self) -> bool:
        """True if the results are there."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Returns the error with which the work ended, if it did."""
        return self._error

    def result(self) -> list[Tensor]:
        """Returns the tensors that hold the result once the work is over."""
        return self._results

    def synchronize(self) -> None:
        """Blocks until the results are there."""
        self.wait()

    def source_rank(self) -> int:
        """Returns the rank in the group from which a message came."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future of the results, which a thread of the group sets."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._is_done:
                    _set(self._future, self._results, self._error)
                else:
                    self._finisher.add(self)
            return self._future


def in_words(error: Exception, line: Line, limit_s: float) -> Exception:
    """Returns an error with the names of the sites in it, where it tells of a timeout alone.

    Scripts look for gloo's words in it.
    """
    if not isinstance(error, ExchangeError) or error.kind != Failure.TIMEOUT:
        return error
    late = ", ".join(map(line.named, error.sites)) or "any other site"
    told = f"nothing came from {late}: Timed out waiting {limit_s * 1000:.0f}ms"
    return ExchangeError(told, error.sites, kind=error.kind)


def _set(future: torch.futures.Future[Any], results: list[Tensor], error: Exception | None) -> None:
    if error is None:
        future.set_result(results)
    else:
        future.set_exception(error)  # type: ignore[arg-type]  # of any kind


class Finisher:
    """Threads that finish works for those who wait on futures, as DDP does.

    One of them watches. Before it finishes a work, another one takes over: what follows a future
    may wait for other works. They end with the group.

    Args:
        line: of this process.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self._works: list[LineWork] = []
        self._is_over, self._watching = False, 0

    def add(self, work: LineWork) -> None:
        """Finishes a work as soon as its messages are there."""
        with self._line.changed:
            self._works.append(work)
            self._watch()
            self._line.changed.notify_all()

    def end(self) -> None:
        """Ends the threads once the works that they have are over."""
        with self._line.changed:
            self._is_over = True
            self._line.changed.notify_all()

    def _watch(self) -> None:
        if not self._watching:
            threading.Thread(target=self._run, name="star works", daemon=True).start()
            self._watching += 1

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work.finish()
            with self._line.changed:
                if self._watching == _MOST_WATCHING:
                    return
                self._watching += 1

    def _next(self) -> LineWork | None:
        """Waits for a work that is due; returns it once another thread watches in its place."""
        with self._line.changed:
            while True:
                work = next((work for work in self._works if work.is_due()), None)
                if work is not None or (self._is_over and not self._works):
                    break
                self._line.changed.wait(_LOOKS_S)
            self._watching -= 1
            if work is not None:
                self._works.remove(work)
                self._watch()
            return work
