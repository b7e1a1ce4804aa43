"""Rules by which batches are drawn, as far as they matter for privacy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Poisson:
    """Batches with each row of a site in them with the same probability, independently.

    Choose it wherever privacy counts: its bounds are the tightest that are known. Batches then
    differ in size, and some are empty (`PoissonSampler`, `CollateEmpty`).

    Attributes:
        rate: q, the probability of each row to be in a batch, above 0 and up to 1. Where the
            sites' rates differ, the largest counts.
        unit: what is drawn, as in `og.Private(unit=...)`: "sample" for a row by itself, "patient"
            for all rows of a patient together.

    Raises:
        ValueError: it is no such probability.
    """

    rate: float
    unit: str = "sample"

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be above 0 and at most 1, not {self.rate!r}")
        object.__setattr__(self, "rate", float(self.rate))  # equal rules have equal states

    def __str__(self) -> str:
        of = "" if self.unit == "sample" else f" per {self.unit}"
        return f"Poisson batches at rate {self.rate:.6g}{of}"

    def turns(self, steps: int) -> int:
        """Returns in how many of so many steps a row may have been drawn."""
        return steps


@dataclass(frozen=True)
class CyclicPoisson:
    """Poisson batches of one part of a site's rows after another, in turn.

    Choose it for noise in bands (`og.Private(bands=...)`), for which a row must not be in two
    batches that are less than `bands` steps apart. Row i is in part i mod `parts`, and a batch has
    each row of its part with probability `rate * parts`, independently. With `rate=1/parts` a batch
    is a whole part. Source: Choquette-Choo et al., arXiv 2306.08153, algorithm 2.

    Attributes:
        rate: share of all rows in a batch, on average, above 0. Where the sites' rates differ, the
            largest counts.
        parts: number of parts, equal on all sites; 1 / `rate` at most.

    Raises:
        ValueError: there are no such batches.
    """

    rate: float
    parts: int

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"parts must be 1 or more, not {self.parts!r}")
        if not 0 < self.rate * self.parts < 1 + 1e-9:
            raise ValueError(
                f"rate must be above 0 and at most 1/parts = {1 / self.parts:.6g}, not "
                f"{self.rate!r}: a batch has rows of one part alone"
            )

    @property
    def of_part(self) -> Poisson:
        """Rule by which a batch is drawn from its part."""
        return Poisson(min(1.0, self.rate * self.parts))

    def __str__(self) -> str:
        return f"Poisson batches at rate {self.rate:.6g}, of {self.parts} parts in turn"

    def turns(self, steps: int) -> int:
        """Returns in how many of so many successive steps a row may have been drawn."""
        return -(-steps // self.parts)


@dataclass(frozen=True)
class Fixed:
    """Batches of a fixed number of rows of a site, without any row twice.

    Choose it where shapes must not change from step to step, at the price of more noise. Where
    the sites' shares `size / rows` differ, the largest counts.

    Attributes:
        size: b, rows of a batch at a site.
        rows: N, rows of the site.
        fresh: whether each batch is drawn anew from all N rows (`FixedSampler`). False for batches
            that go through the rows in turn, shuffled or not, as usual loaders make them: these
            are not independent of each other, and no bound for drawn ones holds for them.

    Raises:
        ValueError: there are no such batches.
    """

    size: int
    rows: int
    fresh: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.rows:
            raise ValueError(f"size must be from 1 to rows={self.rows}, not {self.size!r}")

    @property
    def rate(self) -> float:
        """Share of the rows that are in a batch."""
        return self.size / self.rows

    def __str__(self) -> str:
        how = "drawn anew" if self.fresh else "in turn"
        return f"batches of {self.size:,} of {self.rows:,} rows, {how}"

    def turns(self, steps: int) -> int:
        """Returns in how many of so many steps a row may have been drawn."""
        return steps


Sampling = Poisson | CyclicPoisson | Fixed
"""How batches are drawn."""
