"""Masked sums of a process group: its sites agree on a unit, and then sum whole numbers of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from outergrad.core.errors import ExchangeError
from outergrad.star.backend.works import Awaited, Waiting
from outergrad.star.fixed_point import CARRIERS, finite, not_finite, put_back
from outergrad.star.frames import ALL, Kind, Place
from outergrad.star.line import Line
from outergrad.star.masked_sums import send_masked
from outergrad.star.masks import Masks
from outergrad.star.rounded_sums import counted_in_units, total_in_floats
from outergrad.star.sums import OPERATIONS, coded
from outergrad.star.units import CHANGED, sizes_of, unit_for

Total = Callable[[np.ndarray], None]
"""Takes a sum of integers."""
_LOOKS_S = 1.0
_NOT_FINITE = 1 << 62
"""Added to the number of a sum: place of the counts of what is not finite."""


class InOrder:
    """A thread that makes calls one after the other, and ends with the group."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, call: Callable[[], None]) -> None:
        """Makes a call behind those before."""
        if self._thread is None:
            about = {"args": (self._calls,), "name": "star sums", "daemon": True}
            self._thread = threading.Thread(target=_make_calls, **about)
            self._thread.start()
        self._calls.put(call)

    def end(self, wait_s: float) -> None:
        """Ends the thread behind the calls that it has, and waits for that."""
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(wait_s)


def _make_calls(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()


class HiddenSums:
    """Sums of integers of a group, which the hub makes and cannot read.

    Args:
        line: of this process.
        masks: of this site in the group.
        lanes: of the group, and of second rounds. These have one of their own, with a window and an
            order of its own, since a first round may wait in the window of the other.
        sites: number of sites of the group.
    """

    def __init__(self, line: Line, masks: Masks, lanes: tuple[int, int], sites: int) -> None:
        self.line, self._masks, self._lanes, self.sites = line, masks, lanes, sites

    def number(self) -> int:
        """Returns a number that no other collective of the group has."""
        return self.line.place(Kind.SUM, self._lanes[0]).number

    def start(
        self,
        place: tuple[int, int],
        own: np.ndarray,
        then: Total | None,
        unit: int = 0,
        to: int = ALL,
    ) -> list[Awaited]:
        """Starts to sum integers modulo their width, and masks them in place.

        Args:
            place: 0 or 1 for the first or second lane; and a number. No other sum has this place.
            own: of this site.
            then: called with the sum; None if this site gets none.
            unit: of the integers, or what else all sites have to agree on: else their masks differ.
            to: rank of the only site that gets the sum, or `ALL`.
        """
        at = Place(Kind.SUM, self._lanes[place[0]], place[1], coded(own.dtype.name))
        arrival = None if then is None else self.line.expect(at, {ALL: own.nbytes})
        shown = send_masked(self.line, self._masks, at, own, unit, to)
        if arrival is None or then is None:
            return []
        return [Awaited(at, arrival, lambda rooms: then(shown(rooms[ALL])))]


class AgreedSum(Waiting):
    """A masked sum or mean of floats, in two rounds; a thread of the group starts the second one.

    Whoever waits could not do so: sites may wait for their sums in different orders. A sum has to
    start its second round behind all before it, or it could fill the window that these wait for.

    Args:
        sums: of the group.
        numbers: floats of this site, which are copied.
        operation: "sum" or "mean".
        to: rank of the only site that gets the result, or `ALL`.
        then: called with the bytes of the result; None if this site gets none.
    """

    source = -1

    def __init__(
        self, sums: HiddenSums, numbers: Tensor, operation: str, to: int, then: Total | None
    ) -> None:
        self._sums, self._dtype, self._operation = sums, numbers.dtype, operation
        self._to, self._then, self._number = to, then, sums.number()
        self._own: np.ndarray | None = _floats_of(numbers)
        self._carrier, self._counts = CARRIERS[numbers.dtype], np.zeros(0)
        self._second: list[Awaited] = []
        self._total, self._others, self._unit = np.zeros(0), None, 0
        self._is_over, self._error = False, None
        sizes = sizes_of(self._own, self._carrier, sums.sites)
        unit = OPERATIONS.index(operation)
        (self._sizes,) = sums.start((0, self._number), sizes, self._take_counts, unit)

    def begin_second(self, patience_s: float) -> None:
        """Waits for the first round, and starts the second one; keeps an error for `take`."""
        line = self._sums.line
        try:
            self._sizes.take(line, patience_s)
            self._start_second()
        except Exception as error:
            self._error = error
        with line.changed:
            self._own, self._is_over = None, True
            line.changed.notify_all()

    def _start_second(self) -> None:
        self._unit, is_finite = unit_for(self._counts, self._carrier, self._sums.sites)
        own = self._own
        assert own is not None
        if not is_finite:
            self._begin(self._number | _NOT_FINITE, not_finite(own), self._take_others, 0)
        whole = counted_in_units(finite(own), self._carrier, self._unit, self._sums.sites)
        self._begin(self._number, whole, self._take_total, self._unit)

    def _begin(self, number: int, own: np.ndarray, take: Total, unit: int) -> None:
        then = None if self._then is None else take
        self._second += self._sums.start((1, number), own, then, unit, self._to)

    def _take_counts(self, counts: np.ndarray) -> None:
        self._counts = counts

    def _take_others(self, counts: np.ndarray) -> None:
        self._others = counts

    def _take_total(self, total: np.ndarray) -> None:
        self._total = total

    def is_due(self, line: Line, patience_s: float) -> bool:
        """True if the sum is there, or will not come."""
        with line.changed:
            if not self._is_over:
                return self._sizes.is_late(line, patience_s)
            return all(one.is_due(line, patience_s) for one in self._second)

    def take(self, line: Line, patience_s: float) -> None:
        """Waits for the sum, and writes it."""

        def has_begun() -> bool:
            return self._is_over or self._sizes.is_late(line, patience_s)

        while not has_begun():
            line.wait_for(has_begun, _LOOKS_S)
        if not self._is_over:
            self._sizes.take(line, patience_s)  # which raises: it is late
        if self._error is not None:
            raise self._error
        for one in self._second:
            one.take(line, patience_s)
        if self._then is not None:
            self._then(self._result())

    def _result(self) -> np.ndarray:
        total = total_in_floats(self._total, self._unit)
        if total is None:
            raise ExchangeError(CHANGED)
        if self._others is not None:
            put_back(self._others, total)
        if self._operation == "mean":
            total /= self._sums.sites
        return torch.from_numpy(total).to(self._dtype).view(torch.uint8).numpy()


def _floats_of(numbers: Tensor) -> np.ndarray:
    """Returns a copy of floats in 32 bits, or 64."""
    wide = torch.float64 if numbers.dtype == torch.float64 else torch.float32
    return numbers.detach().cpu().to(wide, copy=True).reshape(-1).numpy()


def hidden_integers(
    sums: HiddenSums, numbers: Tensor, to: int, then: Total | None
) -> Sequence[Awaited]:
    """Starts to sum integers modulo their width: as exactly as without masks."""
    own = numbers.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).numpy()
    written = None if then is None else lambda total: then(total.view(np.uint8))
    return sums.start((0, sums.number()), own, written, 0, to)
