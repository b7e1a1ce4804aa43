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

    def __str__(self) -> str:
        of = "" if self.unit == "sample" else f" per {self.unit}"
        return f"Poisson batches at rate {self.rate:.6g}{of}"


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


Sampling = Poisson | Fixed
"""How batches are drawn."""
