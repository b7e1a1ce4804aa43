"""SIDCo: a threshold for the largest entries of a gradient, from a fitted distribution.

Source: Abdelmoniem, Elzanaty, Alouini and Canini, "An Efficient Statistical-based Gradient
Compression Technique for Distributed Training Systems", MLSys 2021, arXiv 2101.10761. Magnitudes
are taken for samples of a distribution with few parameters. Its quantile is the threshold. A fit
to all magnitudes is poor far out in the tail. So a small density is reached in stages: each stage
keeps a quarter of the entries and fits only those (peaks over threshold).

Two things differ from the paper. The first stages look at a sample of the entries. The last one
looks at all entries above a lower threshold and counts those above its answer: if the count is off,
the answer is moved between thresholds that have been counted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from outergrad.linalg.tail_fits import FITS, Fit

STAGE_DENSITY = 0.25
"""Share of entries that a stage keeps, unless it is the last: delta_1 of the paper."""

SAMPLE = 1 << 15
"""Largest number of entries in the sample of the first stages: small enough that PyTorch does not
start threads for them, which would cost more than they save."""

_MOST_STAGES = 32
_FEWEST = 32
"""Fewest entries that a stage is fitted to."""
_TOLERANCE = 0.05
_ROUNDS = 8
_LOWERED = (1, 2, 4)
"""Factors on the wanted number of entries, tried in turn where a threshold was too high."""
_DEVIATIONS = 4.0
_SMALLEST = 0.5
"""Fractional count that stands for zero entries above a threshold."""
_CHUNK = 1 << 15
"""Entries per piece of a pass on a CPU: a piece stays in the cache, and one thread handles it."""


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
    """Returns a magnitude that the share `density` of a gradient's entries exceeds.

    The share is met to within 5%, or one entry. It is smaller where more entries are zero, or
    where many have the same magnitude. Entries that are not finite are left out of the fits, and
    NaN counts as above every threshold. The host waits for the device several times.

    Args:
        flat: (n,), any floating dtype, n at least 1.
        density: in (0, 1].
        fit: the distribution of the first stage; later ones fit a generalised Pareto distribution
            where this is "gamma", because exceedances of a gamma distribution tend to it.
        stages: None for as many as the density needs, with the answer counted and moved until it
            meets the share. A number for so many stages over all entries that are not zero,
            uncounted, as in the paper.

    Returns:
        A scalar of the gradient's dtype on its device.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check(flat, density, fit, stages)
    if stages is not None:
        return flat.new_tensor(_staged(_wide(flat.abs()), density * len(flat), fit, stages))
    wanted = density * len(flat)
    found = tail(flat, wanted, fit) or exceeding(flat, flat.new_zeros(()))
    return _counted(found.magnitudes_C, found.threshold.item(), wanted, fit)


def tail(flat: Tensor, wanted: float, fit: Fit = "exponential") -> Tail | None:
    """Returns at least `wanted` of the largest entries, and few more; arguments as for `threshold`.

    All other entries are smaller. The threshold is estimated for slightly more than `wanted`
    entries, by four standard deviations of a count in the sample, and lowered twice if too high.
    None if it is still too high: most entries are zero, or many are equal.
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
    """Returns the entries above a threshold, a scalar of their dtype; NaN counts as above."""
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
    wide_M = magnitudes_M.to(torch.promote_types(magnitudes_M.dtype, torch.float32))
    return wide_M[(wide_M > 0) & wide_M.isfinite()]


def _staged(
    magnitudes_M: Tensor, wanted: float, fit: Fit, stages: int | None = None, start: float = 0.0
) -> float:
    """A threshold that about `wanted` of the magnitudes exceed: the paper's fit in stages.

    The density of a stage follows from the number of entries that the previous one left. Stages are
    added until the wanted number is at least a quarter of these, or they are too few for a fit.

    Args:
        magnitudes_M: positive and finite, at least float32, all above `start`.
        wanted: how many of them.
        fit: as for `threshold`.
        stages: largest number of stages, None for no limit.
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
    """A threshold that `wanted` magnitudes exceed, to within 5% or one entry, if there is one.

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
    """Moves a threshold until `wanted` magnitudes exceed it.

    Between two thresholds whose exceedances have been counted, the logarithm of the count is taken
    for a straight line, as it is in an exponential tail. An exact order statistic ends the search.

    Args:
        magnitudes_C: to count exceedances of.
        at: the first threshold to try.
        wanted: number of exceedances.
        low: a threshold with more of them, and their number.
        high: one with fewer, and their number.
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
