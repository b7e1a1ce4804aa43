"""The common entry point to the solvers: checks arguments and picks a solver by shape."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from outergrad.core.types import Factors, Gradient
from outergrad.linalg.low_rank import LowRank, small_core
from outergrad.linalg.outer import added, shape_of
from outergrad.linalg.power import POWER_ITERATIONS, power_iteration
from outergrad.linalg.subspace import (
    OVERSAMPLING,
    SUBSPACE_ITERATIONS,
    WARM_ITERATIONS,
    subspace_iteration,
)

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
