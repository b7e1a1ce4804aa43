"""The common entry point to the solvers: checks arguments and picks a solver by shape."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from outergrad.core.types import Factors, Gradient
from outergrad.linalg.low_rank import LowRank, small_core
from outergrad.linalg.orthonormal import orthonormal
from outergrad.linalg.outer import added, shape_of
from outergrad.linalg.power import (
    POWER_ITERATIONS,
    gaussian_probe,
    power_iteration,
    rayleigh_ritz,
    without_void,
)
from outergrad.linalg.product import Product, Total, cheapest, product, total, unscaled

SUBSPACE_ITERATIONS = 3
WARM_ITERATIONS = 1
OVERSAMPLING = 4
"""From a random start, these settings come within 2 % of the best error, also for slowly falling
singular values; two iterations, within 5 %. From the directions of the previous step, spare
columns included, one iteration does."""


def subspace_iteration(
    gradient: Gradient,
    rank: int,
    tolerance: float = 0.0,
    *,
    iterations: int = SUBSPACE_ITERATIONS,
    oversampling: int = OVERSAMPLING,
    q_GIR: Tensor | None = None,
    plus: Factors | None = None,
) -> LowRank:
    """Approximates the leading singular triplets of `dᵀ a` by a few products with the factors.

    Source: Halko, Martinsson and Tropp, 2011, algorithms 4.4 and 5.1. One iteration with a warm
    start and no oversampling is PowerSGD's (Vogels, Karimireddy and Jaggi, 2019, algorithm 1).

    Args:
        gradient: d_GNO and a_GNI, or the gradient itself, any floating dtype.
        rank: largest R.
        tolerance: largest relative Frobenius error, if R suffices for it.
        iterations: multiplications by the gradient and by its transpose.
        oversampling: columns beyond R to iterate on: each makes a near miss less likely.
        q_GIR: warm start: right singular vectors of length one; columns that are zero or not finite
            are ignored.
        plus: a few more rows, whose outer product is added to the gradient.
    """
    looked_at = unscaled if q_GIR is not None and not tolerance else product
    whole = looked_at(gradient)
    extra = () if plus is None else (looked_at(plus),)
    columns = min(rank + oversampling, total(whole, *extra).largest_rank)
    whole = cheapest(whole, columns, iterations, with_energy=tolerance > 0)
    matrix = total(whole, *extra)
    x_GIK = start(whole.a_GNI, columns, q_GIR)
    p_GOK = orthonormal(matrix.times(x_GIK))
    for _ in range(iterations - 1):
        x_GIK = orthonormal(matrix.transposed_times(p_GOK))
        p_GOK = orthonormal(matrix.times(x_GIK))
    return rayleigh_ritz(matrix, p_GOK, rank, tolerance)


def warm_iteration(matrix: Product | Total, x_GIK: Tensor) -> LowRank:
    """One iteration from directions that were leading before: returns all K triplets, untruncated.

    Args:
        matrix: the gradient, unscaled; a group that is not finite becomes NaN.
        x_GIK: K usable directions.
    """
    p_GOK = orthonormal(matrix.times(x_GIK))
    z_GIK, void_G = without_void(matrix.transposed_times(p_GOK))
    q_GIK, r_GKK = torch.linalg.qr(z_GIK)
    u_GKK, sigma_GK, wt_GKK = torch.linalg.svd(r_GKK)
    if void_G is not None:
        sigma_GK = sigma_GK.masked_fill(void_G[:, None], math.nan)
    d_GOK = p_GOK @ (wt_GKK * sigma_GK[:, :, None]).mT
    return LowRank(d_GOK.mT, (q_GIK @ u_GKK).mT, sigma_GK, None)


def near_one(x_GWK: Tensor) -> Tensor:
    """Scales columns by powers of two to a largest entry near one, without rounding.

    The product of a gradient with unscaled columns would be of the order of the gradient's square.
    """
    peak_G1K = x_GWK.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(x_GWK.dtype).tiny)
    return x_GWK / (peak_G1K / (2 * torch.frexp(peak_G1K).mantissa))


def start(like_GNI: Tensor, columns: int, q_GIR: Tensor | None) -> Tensor:
    """Returns the usable columns of a warm start, and fixed random columns in place of all others.

    Args:
        like_GNI: gives G, I, dtype and device.
        columns: K.
        q_GIR: directions of a warm start; columns that are zero or not finite are replaced.
    """
    groups, _, inputs = like_GNI.shape
    warm_GIR = like_GNI.new_empty(groups, inputs, 0) if q_GIR is None else q_GIR[..., :columns]
    warm_GIR = warm_GIR.to(like_GNI)
    size_G1R = warm_GIR.norm(dim=1, keepdim=True)
    usable_G1R = (size_G1R > 0) & size_G1R.isfinite()
    warm = warm_GIR.shape[2]
    if warm == columns and bool(usable_G1R.all()):
        return warm_GIR
    x_GIK = gaussian_probe(inputs, columns, like_GNI.device).to(like_GNI).expand(groups, -1, -1)
    good_GIR = torch.where(usable_G1R, warm_GIR, x_GIK[..., :warm])
    return torch.cat([good_GIR, x_GIK[..., warm:]], dim=2)


Solver = Literal["auto", "small_core", "subspace_iteration", "power_iteration"]

SMALL_CORE = 32
"""Width of cores up to which their decomposition costs less than launching the operations of
several iterations."""

CORE_PER_COLUMN = 1.0
"""Core width per iterated column above which iterations are faster (one CPU thread,
`benchmarks/solvers.py`)."""


def compress(
    gradient: Gradient,
    rank: int,
    tolerance: float = 0.0,
    *,
    solver: Solver = "auto",
    iterations: int | None = None,
    q_GIR: Tensor | None = None,
    plus: Factors | None = None,
) -> LowRank:
    """Computes the leading singular triplets of a weight gradient, from its factors.

    The returned rank is the smallest that meets the tolerance, at most `rank` and at most the
    numerical rank: 0 for a zero gradient. All groups share it, and the tolerance applies to them
    together. A factor that is not finite makes its group's gradient NaN throughout.

    Args:
        gradient: d_GNO and a_GNI, any floating dtype; N may be zero. b_GO is ignored. Or the
            gradient itself, (G, O, I).
        rank: largest R, at least 1.
        tolerance: largest relative Frobenius error, in [0, 1); 0 keeps `rank` triplets.
        solver: the name of a function of this package, or "auto" for the one that `choose_solver`
            returns.
        iterations: of the iterative solvers, at least 1; None for their own defaults.
        q_GIR: warm start, `a_GRI.mT` of an earlier result, with a few columns more than `rank` if
            one iteration is to suffice; only `subspace_iteration` uses it.
        plus: a few more rows, whose outer product is added to the gradient.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check(rank, tolerance, iterations)
    sweeps = iterations or (SUBSPACE_ITERATIONS if q_GIR is None else WARM_ITERATIONS)
    if solver == "auto":
        solver = choose_solver(*shape_of(gradient), rank, sweeps)
    if solver == "subspace_iteration":
        return subspace_iteration(
            gradient,
            rank,
            tolerance,
            iterations=sweeps,
            oversampling=OVERSAMPLING if q_GIR is None else 0,
            q_GIR=q_GIR,
            plus=plus,
        )
    whole = gradient if plus is None else added(gradient, plus)
    if solver == "small_core":
        return small_core(whole, rank, tolerance)
    if solver == "power_iteration":
        return power_iteration(whole, rank, tolerance, iterations=iterations or POWER_ITERATIONS)
    raise ValueError(f"solver must be one of {get_args(Solver)}, not {solver!r}")


def choose_solver(rows: int, inputs: int, outputs: int, rank: int, iterations: int) -> Solver:
    """Returns the faster of the two block solvers for a shape; the exact one where they are equal.

    A core of width C = min(N, I, O) costs O(C N (I + O)), and T iterations on K columns cost
    O(T K N (I + O)): the core wins while C is below some multiple of T K. Power iterations, one
    vector at a time, are never faster than a block of them.
    """
    core = min(rows, inputs, outputs)
    columns = min(rank + OVERSAMPLING, core)
    least = SMALL_CORE if iterations > WARM_ITERATIONS else 0
    if core <= max(least, CORE_PER_COLUMN * columns * iterations):
        return "small_core"
    return "subspace_iteration"


def _check(rank: int, tolerance: float, iterations: int | None) -> None:
    if rank < 1:
        raise ValueError(f"rank must be at least 1, not {rank}")
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be in [0, 1), not {tolerance}")
    if iterations is not None and iterations < 1:
        raise ValueError(f"iterations must be at least 1, not {iterations}")
