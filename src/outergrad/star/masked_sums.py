"""Sums of integers that the hub makes without reading them: under masks that cancel."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from outergrad.star.frames import ALL, Kind, Place
from outergrad.star.line import Line
from outergrad.star.masks import Masks
from outergrad.star.sums import coded

FIRST, SIZES, AGREED = 0, 6, 7
"""Lanes of sums that start at once, of the sizes by which sites agree on a unit, and of sums in it.

A lane and a number are the place of one sum at most, so their masks are used once."""
_NONCE = struct.Struct("!HhQ")

Total = Callable[[], np.ndarray]
"""Waits for a sum of integers, and returns it."""


def send_masked(
    line: Line, masks: Masks, place: Place, own: np.ndarray, unit: int = 0, recipient: int = ALL
) -> Callable[[np.ndarray], np.ndarray]:
    """Masks integers in place, and sends them; returns what reads their sum.

    Args:
        line: of this process.
        masks: of this site.
        place: of this sum alone, under these masks.
        own: of this site.
        unit: of the integers. Sites that differ in it get random numbers: their masks differ.
        recipient: rank of the only site that gets the sum, or `ALL`.
    """
    nonce, dtype = _NONCE.pack(place.lane, unit, place.number), own.dtype
    masks.hide(own, nonce)
    line.send(place, own.tobytes(), recipient)
    return lambda came: masks.shown(came.view(dtype), nonce)


class MaskedSums:
    """The masked sums of one session.

    Args:
        line: of this process.
        masks: of this site.
        patience_s: timeout of a message, seconds.
        book: called with the bytes of the numbers of each sum.
    """

    def __init__(
        self, line: Line, masks: Masks, patience_s: float, book: Callable[[int], None]
    ) -> None:
        self._line, self._masks, self._patience_s = line, masks, patience_s
        self.book, self.sites = book, len(line.names)

    def number(self) -> int:
        """Returns a number that no other sum of the run has."""
        return self._line.place(Kind.SUM, FIRST).number

    def start(self, lane: int, number: int, own: np.ndarray, unit: int = 0) -> Total:
        """Starts to sum integers modulo their width, and masks them in place.

        Args:
            lane: with the number, the place of this sum alone.
            number: as from `number`.
            own: of this site.
            unit: of the integers. Sites that differ in it get random numbers: their masks differ.
        """
        place = Place(Kind.SUM, lane, number, coded(own.dtype.name))
        arrival = self._line.expect(place, {ALL: own.nbytes})
        shown = send_masked(self._line, self._masks, place, own, unit)
        return lambda: shown(self._line.wait(place, arrival, self._patience_s)[ALL])


class ExactSum:
    """A sum of integers under way.

    Args:
        sums: of the session.
        t: integers, summed in place.
    """

    def __init__(self, sums: MaskedSums, t: Tensor) -> None:
        own = t.detach().cpu().reshape(-1).numpy().copy()
        sums.book(own.nbytes)
        self._total, self._t = sums.start(FIRST, sums.number(), own), t

    def advance(self) -> None:
        """Does nothing: there is no second round."""

    def wait(self) -> Tensor:
        """Returns the sum."""
        return self._t.copy_(torch.from_numpy(self._total()).view(self._t.shape))
