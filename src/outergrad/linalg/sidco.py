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

SAMPLE = 1 << 18
"""Entries that the first stages look at: the cost of a few per cent of a pass over 10⁷."""

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
    where many have the same magnitude. What is not finite is left out of the fits and lies above
    every threshold. It waits for the device several times.

    Args:
        flat: (n,), any floating dtype, n at least 1.
        density: in (0, 1].
        fit: the distribution of the first stage; later ones fit a generalised Pareto distribution
            where this is "gamma", since it is what exceedances of a gamma distribution tend to.
        stages: None for as many as the density needs, with the answer counted and moved until it
            is met. A number for so many stages as in the paper, uncounted.

    Returns:
        A scalar of the gradient's dtype on its device.

    Raises:
        ValueError: an argument out of its range.
    """
    _check(flat, density, fit, stages)
    if stages is not None:
        sample_M = _sample(flat).abs()
        return flat.new_tensor(_staged(_wide(sample_M), density * len(sample_M), fit, stages))
    wanted = density * len(flat)
    found = tail(flat, wanted, fit) or exceeding(flat, flat.new_zeros(()))
    return _counted(found.magnitudes_C, found.threshold.item(), wanted, fit)


def tail(flat: Tensor, wanted: float, fit: Fit = "exponential") -> Tail | None:
    """At least so many of the largest entries, and few more.

    Everything that is not among them is smaller. None where the threshold was still too high at
    four times as many: there are too many zeros, or too many equal numbers.
    """
    sample_M = _sample(flat).abs()
    of_sample = wanted * len(sample_M) / len(flat)
    spread = _DEVIATIONS / math.sqrt(max(of_sample, 1.0)) if len(sample_M) < len(flat) else 0.0
    for times in _LOWERED:
        safe = times * (1 + _TOLERANCE + spread) * of_sample + 1
        found = exceeding(flat, _counted(sample_M, 0.0, safe, fit))
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

    Unlike every so-manieth entry it does not fall into step with the width of a matrix.
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
    """A threshold that about so many of these exceed, section 2.4 of the paper.

    A stage knows how many the one before left. Their number follows from it: stages are added
    until what is wanted is at least a quarter of them, or they are too few to be fitted.

    Args:
        magnitudes_M: positive and finite, at least float32, all above `start`.
        wanted: how many of them.
        fit: as for `threshold`.
        stages: how many at most, None for as many as it takes.
        start: where their distribution begins.
    """
    at = start
    for stage in range(1, (stages or _MOST_STAGES) + 1):
        if wanted >= len(magnitudes_M):
            return at
        share = max(wanted, _SMALLEST) / len(magnitudes_M)
        last = stage == stages or (stages is None and share >= STAGE_DENSITY)
        last = last or STAGE_DENSITY * len(magnitudes_M) < _FEWEST
        first = stage == 1 and start == 0
        kept = share if last else max(share, STAGE_DENSITY)
        at += FITS[fit][0 if first else 1](magnitudes_M - at, kept)
        if last:
            break
        magnitudes_M = magnitudes_M[magnitudes_M > at]
    return at


def _counted(magnitudes_C: Tensor, low: float, wanted: float, fit: Fit) -> Tensor:
    """A threshold that so many of these exceed, to within 5% or one entry, if there is one.

    It is estimated in stages, and what exceeds it is counted. Between two thresholds that have
    been counted, the logarithm of the count is taken for a straight line, as it is in an
    exponential tail. An exact order statistic ends the search.

    Args:
        magnitudes_C: all above `low`, apart from zeros.
        low: a threshold, 0 for none.
        wanted: how many of them.
        fit: as for `threshold`.
    """
    fitted_C = _wide(magnitudes_C)
    not_finite = float((~magnitudes_C.isfinite()).sum())
    of_low = len(fitted_C) + not_finite
    if wanted >= of_low:
        return magnitudes_C.new_tensor(low)
    at = _staged(fitted_C, wanted - not_finite, fit, start=low)
    high, of_high = float(fitted_C.max()) if len(fitted_C) else low, _SMALLEST
    for _ in range(_ROUNDS):
        tried = magnitudes_C.new_tensor(at)
        count = float((~(magnitudes_C <= tried)).sum())
        if abs(count - wanted) <= max(_TOLERANCE * wanted, 1.0):
            return tried
        if count > wanted:
            low, of_low = at, count
        else:
            high, of_high = at, max(count, _SMALLEST)
        if not (low < high < math.inf and of_high < wanted < of_low):
            break
        at = low + (high - low) * math.log(of_low / wanted) / math.log(of_low / of_high)
    return magnitudes_C.kthvalue(len(magnitudes_C) - round(wanted)).values
