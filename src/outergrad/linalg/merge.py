"""Recompression of what several sites sent into factors of one rank."""

from __future__ import annotations

from collections.abc import Sequence

from outergrad.core.types import Factors
from outergrad.linalg.low_rank import LowRank
from outergrad.linalg.outer import stack, widened
from outergrad.linalg.small_core import small_core


def merge(
    parts: Sequence[Factors],
    rank: int,
    tolerance: float = 0.0,
    *,
    weights: Sequence[float] | None = None,
) -> LowRank:
    """The best approximation, of at most the given rank, of a weighted sum of gradients.

    The sum has the stacked rows for factors, few enough for an exact decomposition through a
    small core (Bebendorf, Hierarchical Matrices, 2008, chapter 1). In a tree of merges each
    node gives its own error, relative to its own sum, as `relative_error`.

    Args:
        parts: d_GRO and a_GRI of each site; their ranks may differ.
        rank: largest R.
        tolerance: largest relative Frobenius error, if R suffices for it.
        weights: one per part; None for the mean. In a tree they are the share of sites below.
    """
    if weights is None:
        weights = [1 / len(parts)] * len(parts)
    weighted = [_times(part, weight) for part, weight in zip(parts, weights, strict=True)]
    return small_core(stack(weighted), rank, tolerance)


def _times(part: Factors, weight: float) -> Factors:
    """In float32 at least: a weight in half precision would cost three digits."""
    return Factors(widened(part.d_GRO) * weight, part.a_GRI)
