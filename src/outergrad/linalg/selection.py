"""Selection of the entries to send: the largest, random ones, or the largest blocks.

All functions return sorted indices ("places"), int64, on the gradient's device, deterministically.
Where magnitudes are equal, the first entries count as larger. NaN counts as the largest.

SIDCo finds a threshold for the largest entries from a fitted distribution. Source: Abdelmoniem,
Elzanaty, Alouini and Canini, "An Efficient Statistical-based Gradient Compression Technique for
Distributed Training Systems", MLSys 2021, arXiv 2101.10761. Magnitudes are taken for samples of a
distribution with few parameters: signed entries then follow the double exponential, double gamma or
double generalised Pareto distribution. Its quantile is the threshold. A fit to all magnitudes is
poor far out in the tail. So a small density is reached in stages: each stage keeps a quarter of the
entries and fits only those (peaks over threshold).

Two things differ from the paper. The first stages look at a sample of the entries. The last one
looks at all entries above a lower threshold and counts those above its answer: if the count is off,
the answer is moved between thresholds that have been counted.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_SMALL = 1 << 18
"""Number of entries up to which `top_k` is faster than a threshold (`benchmarks/selection.py`)."""

_ROUNDS = 8
_MULTIPLIERS = (0x9E3779B97F4A7C15 - (1 << 64), 0xD6E8FEB86659FD93 - (1 << 64))
"""Odd numbers without a pattern in their bits."""


def top_k(flat: Tensor, k: int) -> Tensor:
    """Returns the places of the k entries of largest magnitude.

    Args:
        flat: (n,), any floating dtype.
        k: from 1 to n.

    Raises:
        ValueError: k is out of its range, or the gradient is not flat.
    """
    _check_flat(flat, k)
    return _largest(_order(flat), k)


def above(flat: Tensor, k: int) -> Tensor:
    """Returns the same places as `top_k`, faster where there are many entries and k is small.

    SIDCo estimates a threshold for somewhat more entries, and the k largest are picked among those
    above it. Where these are too few, the threshold is lowered twice. After that, and for small
    gradients, all entries are searched.
    """
    _check_flat(flat, k)
    found = tail(flat, k) if len(flat) > _SMALL else None
    if found is None:
        return top_k(flat, k)
    return found.indices_C[_largest(_order(found.magnitudes_C), k)]


def random_k(n: int, k: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Returns the places of k of n entries, drawn without replacement.

    They depend on the numbers alone, not on the device, the versions of libraries or random
    streams, so that sites that share the seed draw the same places. The cost is O(k): a permutation
    chosen by the seed is applied to the numbers below k. It is a Feistel network of 8 rounds on
    pairs of half as many bits. It is applied again to results of n or above until they are below
    (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
        n: at least 1, below 2⁶².
        k: from 1 to n.
        seed: any integer.
        device: of the places.

    Raises:
        ValueError: k or n is out of its range.
    """
    _check(n, k)
    if k == n:
        return torch.arange(n, device=device)
    keys = _keys(seed)
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    numbers_K = torch.arange(k, device=device)
    if numbers_K.device.type == "cpu":  # by NumPy, whose calls take a fraction of the time
        return torch.from_numpy(np.sort(_walked(numbers_K.numpy(), n, half, keys)))
    return _walked(numbers_K, n, half, keys).sort().values


def top_blocks(flat: Tensor, k: int, block: int) -> Tensor:
    """Returns the places of all entries of the blocks of largest Euclidean norm.

    A block is a run of consecutive entries; the last one may be short. The number of chosen blocks
    and of their entries follows from the lengths alone: see `blocks_of`.

    Args:
        flat: (n,), any floating dtype.
        k: approximate number of entries, from 1 to n.
        block: entries of a block, at least 1.

    Raises:
        ValueError: an argument is out of its range.
    """
    return entries_of(leading_blocks(flat, k, block), len(flat), block)


def blocks_of(n: int, k: int, block: int) -> tuple[int, int]:
    """Returns how many blocks `top_blocks` chooses, and how many entries these have.

    `k / block` blocks, rounded half up, at least one and at most all `ceil(n / block)`. B blocks
    have `min(n, B * block)` entries, even if the short last one is among them: its missing entries
    are then taken from the beginning of the first block that was not chosen.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check(n, k)
    if block < 1:
        raise ValueError(f"block={block!r}; use at least 1 entry")
    blocks = min(max(1, (2 * k + block) // (2 * block)), -(-n // block))
    return blocks, min(n, blocks * block)


def leading_blocks(flat: Tensor, k: int, block: int) -> Tensor:
    """Returns the sorted numbers of the blocks that `top_blocks` chooses; arguments as there."""
    _check_flat(flat, k)
    n = len(flat)
    blocks, _ = blocks_of(n, k, block)
    whole = n // block * block
    parts = [flat[:whole].view(-1, block), flat[whole:].view(1, -1)]
    parts = [part for part in parts if part.numel()]
    norms = _norms(parts)
    return _largest(_order(torch.cat(norms)), blocks)


def entries_of(blocks_B: Tensor, n: int, block: int) -> Tensor:
    """Returns the sorted places of the entries of chosen blocks, completed as in `blocks_of`.

    Args:
        blocks_B: numbers of blocks, sorted and distinct, below `ceil(n / block)`.
        n: entries of the gradient.
        block: entries of a block.
    """
    inside = torch.arange(block, device=blocks_B.device)
    places_K = (blocks_B[:, None] * block + inside).view(-1)
    if len(places_K) >= n:
        return places_K[:n]
    lacking = places_K >= n
    added = _first_not_among(blocks_B) * block + lacking.cumsum(0) - 1
    return torch.where(lacking, added, places_K).sort().values


def _first_not_among(blocks_B: Tensor) -> Tensor:
    return (blocks_B == torch.arange(len(blocks_B), device=blocks_B.device)).sum()


def _check(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k={k!r} of {n} entries; use a number from 1 to {n}")


def _check_flat(flat: Tensor, k: int) -> None:
    if flat.dim() != 1 or not flat.is_floating_point():
        raise ValueError(
            f"entries of {flat.dtype} of shape {tuple(flat.shape)}; use gradient.flatten()"
        )
    _check(len(flat), k)


def _order(flat: Tensor) -> Tensor:
    """Integers in the order of the magnitudes: their bits; NaN's are larger than infinity's."""
    bits = flat.contiguous().view(_BITS[flat.element_size()])
    return bits & torch.iinfo(bits.dtype).max


def _norms(parts: Sequence[Tensor]) -> list[Tensor]:
    """Norms of the rows in float64; float64 rows are scaled so that their squares stay in range."""
    if all(part.dtype != torch.float64 for part in parts):
        return [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in parts]
    peak = max((part.abs().amax().item() for part in parts if part.numel()), default=0.0)
    unit = peak if math.isfinite(peak) and peak and not 1e-100 < peak < 1e100 else 1.0
    return [torch.linalg.vector_norm(part / unit, dim=1, dtype=torch.float64) for part in parts]


def _largest(order_N: Tensor, k: int) -> Tensor:
    """Sorted places of the k largest of non-negative integers; of equal ones the first."""
    if k == len(order_N):
        return torch.arange(k, device=order_N.device)
    smallest = _kth_largest(order_N, k) if int(order_N.count_nonzero()) >= k else 0
    chosen_N = order_N > smallest
    missing = k - int(chosen_N.count_nonzero())
    chosen_N[_first(order_N == smallest, missing)] = True
    return chosen_N.nonzero().view(-1)


def _first(flags_N: Tensor, count: int) -> Tensor:
    """Places of the first `count` set flags; at least as many must be set."""
    looked_at = 2 * count
    while len(found := flags_N[:looked_at].nonzero().view(-1)) < count:
        looked_at *= 8
    return found[:count]


def _kth_largest(order_N: Tensor, k: int) -> int:
    """The k-th largest; on a CPU by NumPy in a tenth of the time, since it moves no indices."""
    if order_N.device.type == "cpu":
        place = len(order_N) - k
        return int(np.partition(order_N.numpy(), place)[place])
    return int(order_N.topk(k, sorted=False).values.min())


def _keys(seed: int) -> list[int]:
    digest = hashlib.sha256(str(int(seed)).encode()).digest()
    return [int.from_bytes(digest[4 * i : 4 * i + 4], "big") for i in range(_ROUNDS)]


def _walked(x: Any, n: int, half: int, keys: list[int]) -> Any:
    """A permutation of the numbers below n: where it takes these numbers, tensor or array."""
    found = _permuted(x, half, keys)
    outside = found >= n
    while outside.any():
        found[outside] = _permuted(found[outside], half, keys)
        outside = found >= n
    return found


def _permuted(x: Any, half: int, keys: list[int]) -> Any:
    """A permutation of the numbers below 2^(2 half)."""
    mask = (1 << half) - 1
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half) | right


def _mixed(x: Any) -> Any:
    """31 bits that depend on all bits of a number; products are modulo 2^64."""
    x = x * _MULTIPLIERS[0]
    x = (x ^ (x >> 32)) * _MULTIPLIERS[1]
    return (x >> 33) & 0x7FFFFFFF


Fit = Literal["exponential", "gamma", "pareto"]
Quantile = Callable[[Tensor, float], float]

_NEWTON_STEPS = 4
_HALVINGS = 60
_LEAST_SPREAD = 1e-6
"""Smallest spread assumed, so that equal numbers have a quantile in every fit."""


def exponential_quantile(x_M: Tensor, share: float) -> float:
    """Returns the value that a share of a fitted exponential distribution exceeds.

    Its mean μ is set to that of the numbers, the maximum-likelihood estimate.
    `exp(-t/μ) = share` gives `t = μ log(1/share)`.

    Args:
        x_M: positive, (M,), M at least 1.
        share: in (0, 1].
    """
    return _mean(x_M) * math.log(1 / share)


def pareto_quantile(x_M: Tensor, share: float) -> float:
    """Returns the value that a share of a fitted generalised Pareto distribution exceeds.

    Arguments as for `exponential_quantile`. With shape ξ and scale σ the mean is `μ = σ/(1-ξ)` and
    the variance `v = μ²/(1-2ξ)`. Solved for them: `ξ = (1 - μ²/v)/2` and `σ = μ(1-ξ)`.
    `(1 + ξt/σ)^(-1/ξ) = share` gives `t = σ/ξ (share^(-ξ) - 1)`, and as for an exponential
    distribution where ξ is zero.
    """
    mean = _mean(x_M)
    variance = float(x_M.double().var(correction=0)) / mean**2
    shape = (1 - 1 / max(variance, _LEAST_SPREAD)) / 2
    scale = mean * (1 - shape)
    log_share = math.log(share)
    if abs(shape * log_share) < _LEAST_SPREAD:
        return -scale * log_share
    return scale / shape * math.expm1(-shape * log_share)


def gamma_quantile(x_M: Tensor, share: float) -> float:
    """Returns the value that a share of a fitted gamma distribution exceeds.

    Arguments as for `exponential_quantile`. The mean is that of the numbers. The shape α is the
    maximum-likelihood estimate: it solves `log α - ψ(α) = s` with `s = log(mean x) - mean(log x)`.
    The quantile solves `Q(α, αt/mean) = share`, Q the upper regularised incomplete gamma function,
    by bisection; the paper has a formula for a bound on it, which is 20% and more off at large
    shares.
    """
    mean = _mean(x_M)
    spread = math.log(mean) - _mean(x_M.log())
    shape = _gamma_shape(max(spread, _LEAST_SPREAD))
    return mean / shape * _gamma_point(shape, share)


def _mean(x_M: Tensor) -> float:
    return float(x_M.mean(dtype=torch.float64))


def _gamma_shape(s: float) -> float:
    """Solves `log α - ψ(α) = s`: a closed approximation, refined by Newton steps in 1/α.

    Source: Minka, "Estimating a Gamma distribution", 2002.
    """
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    for _ in range(_NEWTON_STEPS):
        at = torch.tensor(shape, dtype=torch.float64)
        error = math.log(shape) - float(at.digamma()) - s
        slope = shape - shape**2 * float(at.polygamma(1))
        shape = 1 / (1 / shape + error / slope)
    return shape


def _gamma_point(shape: float, share: float) -> float:
    """Solves `Q(shape, t) = share` for t, searched in log t, since t may be tiny."""
    of = torch.tensor(shape, dtype=torch.float64)
    low, high = -700.0, math.log(shape + 1) + math.log(2 - math.log(share)) + 1
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        point = torch.tensor(math.exp(middle), dtype=torch.float64)
        if float(torch.special.gammaincc(of, point)) > share:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


FITS: dict[Fit, tuple[Quantile, Quantile]] = {
    "exponential": (exponential_quantile, exponential_quantile),
    "gamma": (gamma_quantile, pareto_quantile),
    "pareto": (pareto_quantile, pareto_quantile),
}
"""Quantile functions of each fit: for the magnitudes, and for exceedances in later stages."""


STAGE_DENSITY = 0.25
"""Share of entries that a stage keeps, unless it is the last: delta_1 of the paper."""

SAMPLE = 1 << 15
"""Largest number of entries in the sample of the first stages: small enough that PyTorch does not
start threads for them, which would cost more than they save."""

_MOST_STAGES = 32
_FEWEST = 32
"""Fewest entries that a stage is fitted to."""
_TOLERANCE = 0.05
_ITERATIONS = 8
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
    _check_settings(flat, density, fit, stages)
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


def _check_settings(flat: Tensor, density: float, fit: str, stages: int | None) -> None:
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
    for _ in range(_ITERATIONS):
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
