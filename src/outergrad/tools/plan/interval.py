"""Intervals that a measured amount lies in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

FEWEST = 3
"""Samples below which a spread says little."""
UNKNOWN = 2.0
"""Factor by which fewer samples may be wrong."""
DOUBT = 0.01
"""Share of medians that may lie outside of the interval, if samples are independent."""
EVEN = 0.03
"""Relative difference up to which two amounts count as equal."""


@dataclass(frozen=True)
class Interval:
    """Amounts between two bounds, both of them above zero."""

    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[Interval]) -> Interval:
        """Returns an interval of the median of amounts that each lie in one of the samples."""
        cut = _cut(len(samples))
        low = sorted(sample.low for sample in samples)[cut]
        high = sorted(sample.high for sample in samples)[-1 - cut]
        doubt = 1.0 if len(samples) >= FEWEST else UNKNOWN
        return cls(low / doubt, high * doubt)

    @classmethod
    def around(cls, intervals: Iterable[Interval]) -> Interval:
        """Returns the smallest interval that contains others."""
        lows, highs = zip(*((one.low, one.high) for one in intervals), strict=True)
        return cls(min(lows), max(highs))

    @property
    def bounds(self) -> tuple[float, float]:
        """Both bounds."""
        return self.low, self.high

    @property
    def middle(self) -> float:
        """Geometric mean of the bounds."""
        return math.sqrt(self.low * self.high)

    @property
    def is_even(self) -> bool:
        """True if all amounts in it are about equal."""
        return self.high <= self.low * (1 + EVEN)

    def is_below(self, other: Interval) -> bool:
        """True if every amount in it is less than all in the other, by more than is even."""
        return self.high * (1 + EVEN) < other.low

    def over(self, other: Interval) -> Interval:
        """Returns the interval of the ratio of an amount in this one to one in the other."""
        return Interval(self.low / other.high, self.high / other.low)

    def at_least(self, other: Interval) -> Interval:
        """Returns the interval of an amount that is known not to be less than another."""
        return Interval(max(self.low, other.low), max(self.high, other.high))

    def outward(self) -> Interval:
        """Returns the interval with bounds of three digits, rounded away from its middle."""
        return Interval(_rounded(self.low, math.floor), _rounded(self.high, math.ceil))


def _cut(count: int) -> int:
    """Samples to leave out at each end.

    The median is below all but k of n samples as often as a coin falls heads at most k times.
    """
    cut, heads = 0, 0
    for k in range(count // 2):
        heads += math.comb(count, k)
        if 2 * heads > DOUBT * 2**count:
            break
        cut = k
    return cut


def _rounded(value: float, towards: Callable[[float], int]) -> float:
    shift = 10.0 ** (2 - math.floor(math.log10(value)))
    # Without the inner rounding 0.23 would become 0.229: its product is 22.999999999999996.
    return towards(round(value * shift, 6)) / shift
