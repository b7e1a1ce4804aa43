"""SIDCo: a threshold for the largest entries of a gradient, from a distribution fitted to them.

Source: Abdelmoniem, Elzanaty, Alouini and Canini, "An Efficient Statistical-based Gradient
Compression Technique for Distributed Training Systems", MLSys 2021, arXiv 2101.10761. Magnitudes
are taken for samples of a distribution with few parameters. Its quantile is the threshold. A fit
to all magnitudes is poor far out in the tail, so that a small density is reached in stages: each
keeps a quarter and fits what lies above to these alone (peaks over threshold).

Two things are ours. The first stages look at a sample of the entries. The last one looks at all
entries above a lower threshold, whose number is known, and its answer is counted: where it misses,
it is moved between thresholds that have been counted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from outergrad.linalg.tail_fits import FITS, Fit

STAGE_DENSITY = 0.25
"""The share that a stage keeps, unless it is the last: delta_1 of the paper."""

SAMPLE = 1 << 15
"""Entries that the first stages look at, where there are more: so few that PyTorch does not start
threads for them, which would cost more than they save."""

_MOST_STAGES = 32
_FEWEST = 32
"""Stages end where the next would be fitted to fewer entries than this."""
_TOLERANCE = 0.05
_ROUNDS = 8
_LOWERED = (1, 2, 4)
"""How many times as many entries a threshold is estimated for, where it was too high."""
_DEVIATIONS = 4.0
_SMALLEST = 0.5
"""Of an entry: what a threshold above all entries is estimated for."""
_CHUNK = 1 << 15
"""On a CPU a pass goes through pieces that stay in the cache, each on one thread."""


class Tail(NamedTuple):
    """The entries of a gradient whose magnitude is above a threshold, and those that are NaN.

    Attributes:
        threshold: of the gradient's dtype, a scalar.
        indices_C: their places, int64, sorted.
        magnitudes_C: of the gradient's dtype.
    """

    threshold: Tensor
    indices_C: Tensor
    magnitudes_C: Tensor


def threshold(
    flat: Tensor, density: float, fit: Fit = "exponential", stages: int | None = None
) -> Tensor:
    """A magnitude that the share `density` of a gradient's entries exceeds.

    The share is met to within 5%, or one entry. It is smaller where more entries are zero, or
    where many have the same magnitude. What is not finite is left out of the fits, and NaN lies
    above every threshold. The host waits for the device several times.

    Args:
        flat: (n,), any floating dtype, n at least 1.
        density: in (0, 1].
        fit: the distribution of the first stage; later ones fit a generalised Pareto distribution
            where this is "gamma", since it is what exceedances of a gamma distribution tend to.
        stages: None for as many as the density needs, with the answer counted and moved until it
            is met. A number for so many stages over all entries that are not zero, uncounted, as
            in the paper.

    Returns:
        A scalar of the gradient's dtype on its device.

    Raises:
        ValueError: an argument out of its range.
    """
    _check(flat, density, fit, stages)
    if stages is not None:
        return flat.new_tensor(_staged(_wide(flat.abs()), density * len(flat), fit, stages))
    wanted = density * len(flat)
    found = tail(flat, wanted, fit) or exceeding(flat, flat.new_zeros(()))
    return _counted(found.magnitudes_C, found.threshold.item(), wanted, fit)


def tail(flat: Tensor, wanted: float, fit: Fit = "exponential") -> Tail | None:
    """At least so many of the largest entries, and few more; arguments as above.

    All other entries are smaller. The threshold is estimated for a little more than what is
    wanted, by four standard deviations of a count in the sample, and lowered twice if it was too
    high. None where it still is: most entries are zero, or many are equal.
    """
    sample_M = _sample(flat).abs()
    of_sample = wanted * len(sample_M) / len(flat)
    spread = _DEVIATIONS / math.sqrt(max(of_sample, 1.0)) if len(sample_M) < len(flat) else 0.0
    last = math.inf
    for times in _LOWERED:
        lower = _counted(sample_M, 0.0, times * (1 + _TOLERANCE + spread) * of_sample + 1, fit)
        if lower == last:
            break
        found, last = exceeding(flat, lower), lower
        if len(found.indices_C) >= wanted:
            return found
    return None


def exceeding(flat: Tensor, threshold: Tensor) -> Tail:
    """The entries above a threshold, a scalar of their dtype; NaN is above."""
    above = torch.empty_like(flat, dtype=torch.bool)
    chunk = _CHUNK if flat.device.type == "cpu" else len(flat)
    for part, found in zip(flat.split(chunk), above.split(chunk), strict=True):
        torch.le(part.abs(), threshold, out=found).logical_not_()
    indices_C = above.nonzero().view(-1)
    return Tail(threshold, indices_C, flat[indices_C].abs())


def _check(flat: Tensor, density: float, fit: str, stages: int | None) -> None:
    if flat.dim() != 1 or not len(flat) or not flat.is_floating_point():
        raise ValueError(
            f"a threshold is of a flat gradient with entries, not {flat.dtype} of shape "
            f"{tuple(flat.shape)}; use gradient.flatten()"
        )
    if not 0 < density <= 1:
        raise ValueError(f"density={density!r}; use a number in (0, 1]")
    if fit not in FITS:
        raise ValueError(f"fit={fit!r}; use one of {', '.join(map(repr, FITS))}")
    if stages is not None and stages < 1:
        raise ValueError(f"stages={stages!r}; use at least 1, or None")


def _sample(flat: Tensor) -> Tensor:
    """A fixed choice of entries, spread evenly: multiples of the golden ratio, modulo n.

    Entries at a fixed distance could all be of a few columns of a matrix.
    """
    n = len(flat)
    if n <= SAMPLE:
        return flat
    step = round(n * (math.sqrt(5) - 1) / 2)
    step = next(s for s in range(step, step + n) if math.gcd(s, n) == 1)
    return flat[torch.arange(SAMPLE, device=flat.device) * step % n]


def _wide(magnitudes_M: Tensor) -> Tensor:
    """In at least float32, without zeros and what is not finite."""
    wide_M = magnitudes_M.to(torch.promote_types(magnitudes_M.dtype, torch.float32))
    return wide_M[(wide_M > 0) & wide_M.isfinite()]


def _staged(
    magnitudes_M: Tensor, wanted: float, fit: Fit, stages: int | None = None, start: float = 0.0
) -> float:
    """A threshold that about so many of these exceed: the paper's fit in stages.

    A stage knows how many the one before left, and its density follows from that. Stages are added
    until what is wanted is at least a quarter of them, or they are too few for another one.

    Args:
        magnitudes_M: positive and finite, at least float32, all above `start`.
        wanted: how many of them.
        fit: as for `threshold`.
        stages: how many at most, None for as many as it takes.
        start: where their distribution begins.
    """
    at, wanted = start, max(wanted, _SMALLEST)
    for stage in range(1, (stages or _MOST_STAGES) + 1):
        if wanted >= len(magnitudes_M):
            return at
        of_magnitudes, of_exceedances = FITS[fit]
        quantile = of_magnitudes if at == 0 else of_exceedances
        share = wanted / len(magnitudes_M)
        if stage == stages or _is_last(len(magnitudes_M), share, adapts=stages is None):
            return at + quantile(magnitudes_M - at, share)
        at += quantile(magnitudes_M - at, max(share, STAGE_DENSITY))
        magnitudes_M = magnitudes_M[magnitudes_M > at]
    return at


def _is_last(count: int, share: float, *, adapts: bool) -> bool:
    return (adapts and share >= STAGE_DENSITY) or STAGE_DENSITY * count < _FEWEST


def _counted(magnitudes_C: Tensor, low: float, wanted: float, fit: Fit) -> Tensor:
    """A threshold that so many of these exceed, to within 5% or one entry, if there is one.

    Args:
        magnitudes_C: all above `low`, apart from zeros.
        low: a threshold, 0 for none.
        wanted: how many of them.
        fit: as for `threshold`.
    """
    fitted_C = _wide(magnitudes_C)
    not_finite = int((~magnitudes_C.isfinite()).sum())
    above_low = len(fitted_C) + not_finite
    if wanted >= above_low:
        return magnitudes_C.new_tensor(low)
    at = _staged(fitted_C, wanted - not_finite, fit, start=low)
    high = float(fitted_C.max()) if len(fitted_C) else low
    return _moved(magnitudes_C, at, wanted, (low, above_low), (high, _SMALLEST))


def _moved(
    magnitudes_C: Tensor,
    at: float,
    wanted: float,
    low: tuple[float, float],
    high: tuple[float, float],
) -> Tensor:
    """A threshold moved until so many exceed it.

    Between two thresholds whose exceedances have been counted, the logarithm of the count is taken
    for a straight line, as it is in an exponential tail. An exact order statistic ends the search.

    Args:
        magnitudes_C: what exceedances are counted of.
        at: the first that is tried.
        wanted: how many exceedances.
        low: a threshold with more of them, and how many.
        high: one with fewer.
    """
    for _ in range(_ROUNDS):
        tried = magnitudes_C.new_tensor(at)
        count = int((~(magnitudes_C <= tried)).sum())
        if abs(count - wanted) <= max(_TOLERANCE * wanted, 1.0):
            return tried
        if count > wanted:
            low = at, count
        else:
            high = at, max(count, _SMALLEST)
        if not (low[0] < high[0] < math.inf and high[1] < wanted):
            break
        steps = math.log(low[1] / wanted) / math.log(low[1] / high[1])
        at = low[0] + (high[0] - low[0]) * steps
    return magnitudes_C.topk(min(round(wanted) + 1, len(magnitudes_C))).values[-1]
