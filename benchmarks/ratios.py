"""A method's step over another's of the same round, and how sure the figure is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median


@dataclass(frozen=True)
class Ratio:
    """A step over another.

    Attributes:
        median: over the rounds.
        lower: below the true median with 97.5%.
        upper: above it with 97.5%.
    """

    median: float
    lower: float
    upper: float

    @staticmethod
    def of(rounds: Sequence[float]) -> Ratio:
        """From one figure per round, whatever the distribution: by their order."""
        found, skip = sorted(rounds), _outside(len(rounds))
        return Ratio(median(found), found[skip], found[-1 - skip])

    @staticmethod
    def between(steps_s: Sequence[Sequence[float]], others_s: Sequence[Sequence[float]]) -> Ratio:
        """Of the medians of the steps of each round, over those of another method."""
        pairs = zip(steps_s, others_s, strict=False)
        return Ratio.of([median(own) / median(other) for own, other in pairs])

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lower:.2f} to {self.upper:.2f})"

    def is_slower_than(self, recorded: Ratio) -> bool:
        """Whether more than noise is between them."""
        return self.lower > recorded.upper


def _outside(count: int) -> int:
    """How many of so many figures may be left out on one side: 2.5% of a binomial distribution."""
    below, skip = 0.0, 0
    while skip < (count - 1) // 2 and (below := below + comb(count, skip) / 2**count) <= 0.025:
        skip += 1
    return max(0, skip - 1)
