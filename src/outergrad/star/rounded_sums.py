"""Masked sums of floats, which are rounded to whole numbers of a unit that all sites know.

They know it from the last sum of its kind. Before the first one, and where numbers have changed too
much, they agree on it by a short sum.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outergrad.core.errors import ExchangeError
from outergrad.star.fixed_point import (
    CARRIERS,
    Carrier,
    finite,
    in_floats,
    in_units,
    largest_of,
    not_finite,
    put_back,
)
from outergrad.star.masked_sums import AGREED, FIRST, SIZES, ExactSum, MaskedSums, Total
from outergrad.star.units import CHANGED, Units, sizes_of, unit_for


def masked_sum(sums: MaskedSums, units: Units, t: Tensor) -> RoundedSum | ExactSum:
    """Starts to sum t in place; floats must not change before the sum is there."""
    return RoundedSum(sums, units, t) if t.dtype in CARRIERS else ExactSum(sums, t)


class RoundedSum:
    """A sum of floats under way: at once in a unit that is known, or else in two rounds.

    If numbers of a site do not fit the unit that is known, or the sum is too small for it, all
    sites see so alike, and make the sum again in one on which they agree.

    Args:
        sums: of the session.
        units: of its earlier sums.
        t: floats, summed in place.
    """

    def __init__(self, sums: MaskedSums, units: Units, t: Tensor) -> None:
        self._sums, self._units, self._t = sums, units, t
        self._carrier, self._kind = CARRIERS[t.dtype], units.next_kind(t)
        self._number = sums.number()
        self._sizes: Total | None = None
        self._not_finite: Total | None = None
        self._in_unit: _SumInUnit | None = None
        if (known := units.of(self._kind)) is None:
            self._count_sizes()
        else:
            self._in_unit = self._started(FIRST, self._number, known, self._own())

    def advance(self) -> None:
        """Starts the sum itself, if the sites have to agree on a unit before."""
        if self._sizes is None:
            return
        unit, is_finite = unit_for(self._sizes(), self._carrier, self._sums.sites)
        self._sizes, own = None, self._own()
        if not is_finite:
            counts = not_finite(own)
            self._not_finite = self._sums.start(AGREED, 2 * self._number + 1, counts)
        self._in_unit = self._started(AGREED, 2 * self._number, unit, finite(own))

    def wait(self) -> Tensor:
        """Returns the sum."""
        if self._in_unit is not None and not self._in_unit.is_agreed:
            total = self._in_unit.total()
            if total is not None and self._units.is_fine(self._kind, largest_of(total)):
                return self._ended(total)
            self._units.forget(self._kind)
            self._in_unit = None
            self._count_sizes()
        return self._ended(self._in_agreed_unit())

    def _in_agreed_unit(self) -> np.ndarray:
        self.advance()
        assert self._in_unit is not None
        total = self._in_unit.total()
        if total is None:
            raise ExchangeError(CHANGED)
        if self._not_finite is None:
            self._units.learn(self._kind, self._in_unit.unit, largest_of(total))
        else:
            put_back(self._not_finite(), total)
        return total

    def _ended(self, total: np.ndarray) -> Tensor:
        return self._t.copy_(torch.from_numpy(total).to(self._t.dtype).view(self._t.shape))

    def _own(self) -> np.ndarray:
        own = self._t.detach().cpu().reshape(-1)
        return (own if own.dtype == torch.float64 else own.float()).numpy()

    def _count_sizes(self) -> None:
        sizes = sizes_of(self._own(), self._carrier, self._sums.sites)
        self._sizes = self._sums.start(SIZES, self._number, sizes)

    def _started(self, lane: int, number: int, unit: int, own: np.ndarray) -> _SumInUnit:
        return _SumInUnit(self._sums, self._carrier, (lane, number), unit, own)


class _SumInUnit:
    """A sum of whole numbers of a unit.

    A last number counts the sites whose own do not fit: these send zeros.

    Args:
        sums: of the session.
        carrier: the integers.
        place: lane and number of the sum.
        unit: the same on all sites, or the sum is none.
        own: floats of this site.
    """

    def __init__(
        self, sums: MaskedSums, carrier: Carrier, place: tuple[int, int], unit: int, own: np.ndarray
    ) -> None:
        self.unit, self.is_agreed = unit, place[0] == AGREED
        whole = counted_in_units(own, carrier, unit, sums.sites)
        sums.book(whole[:-1].nbytes)
        self._total = sums.start(*place, whole, unit)

    def total(self) -> np.ndarray | None:
        """Returns the sum in floats; None if numbers of a site did not fit, or units differed."""
        return total_in_floats(self._total(), self.unit)


def counted_in_units(own: np.ndarray, carrier: Carrier, unit: int, sites: int) -> np.ndarray:
    """Returns floats as whole numbers of a unit, and 0 behind them; zeros and 1 if they do not fit.

    Args:
        own: floats of this site.
        carrier: the integers.
        unit: exponent of the power of two.
        sites: S.
    """
    whole = np.zeros(len(own) + 1, carrier.dtype)
    if carrier.fits(largest_of(own), unit, sites):
        in_units(own, unit, whole[:-1])
    else:
        whole[-1] = 1
    return whole


def total_in_floats(whole: np.ndarray, unit: int) -> np.ndarray | None:
    """Returns a sum of what `counted_in_units` returned, in floats of 64 bits.

    Returns None if numbers of a site did not fit, or units differed.
    """
    return None if whole[-1] else in_floats(whole[:-1], unit)
