"""Units of sums of floats: agreed on by all sites, and remembered for the next sum of a kind."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from outergrad.core.errors import ExchangeError
from outergrad.star.fixed_point import HEADROOM, Carrier, finite, largest_of

CHANGED = (
    "a sum around the hub does not come out: something has changed it on its way, or sites run "
    "different versions of outergrad. Install one version on all sites; if they have it, ask "
    "whoever runs the hub"
)
_MOST_KINDS = 1 << 12
"""Most kinds of sums whose units are remembered."""
_FALL = 2.0**-HEADROOM
"""Share of the sum for which sites agreed on a unit to which a later one may fall."""


def sizes_of(own: np.ndarray, carrier: Carrier, sites: int) -> np.ndarray:
    """Returns 1 at the place of the exponent of a site's largest number, and 0 elsewhere.

    The sum over the sites says how many have numbers of which size, not which of them. The last
    number counts those that have numbers that are not finite.
    """
    counted = "uint8" if sites < 1 << 8 else "int32"
    sizes = np.zeros(carrier.highest - carrier.lowest + 2, counted)
    sizes[carrier.exponent(largest_of(finite(own))) - carrier.lowest] = 1
    sizes[-1] = not np.isfinite(largest_of(own))
    return sizes


def unit_for(sizes: np.ndarray, carrier: Carrier, sites: int) -> tuple[int, bool]:
    """Returns the unit for the largest number of all sites, and whether all numbers are finite.

    Args:
        sizes: sum over the sites of what `sizes_of` returned.
        carrier: integers that carry the numbers.
        sites: S.

    Raises:
        ExchangeError: it is no such sum.
    """
    *counts, others = sizes.tolist()
    if sum(counts) != sites or not 0 <= others <= sites:
        raise ExchangeError(CHANGED)
    exponent = carrier.lowest + max(k for k, count in enumerate(counts) if count)
    return carrier.unit(exponent, sites), not others


class _Unit(NamedTuple):
    """A unit on which the sites have agreed.

    Attributes:
        exponent: of the power of two.
        largest: largest number of the sum for which they did.
    """

    exponent: int
    largest: float


class Units:
    """The units of earlier sums, by their kind: the same on all sites.

    A sum is of the same kind as the one at its place in the step before, of its dtype and length.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Unit] = {}
        self._place: int | None = None

    def take_turn(self, turn: int) -> None:
        """Notes that the next sum is the first of a step, or between two steps if `turn` is 0."""
        self._place = 0 if turn else None

    def next_kind(self, t: Tensor) -> Hashable:
        """Returns the kind of the next sum."""
        kind = self._place, t.dtype, t.numel()
        if self._place is not None:
            self._place += 1
        return kind

    def of(self, kind: Hashable) -> int | None:
        """Returns the unit of the last sum of a kind; None if the sites have to agree on one."""
        known = self._known.get(kind)
        return None if known is None else known.exponent

    def is_fine(self, kind: Hashable, largest: float) -> bool:
        """True if a sum is not so small that its unit is too coarse for it."""
        return kind in self._known and largest >= _FALL * self._known[kind].largest

    def learn(self, kind: Hashable, unit: int, largest: float) -> None:
        """Remembers a unit on which the sites have agreed, and the largest number of their sum."""
        if len(self._known) == _MOST_KINDS:
            self._known.clear()
        if largest:
            self._known[kind] = _Unit(unit, largest)

    def forget(self, kind: Hashable) -> None:
        """Forgets the unit of a kind."""
        self._known.pop(kind, None)
