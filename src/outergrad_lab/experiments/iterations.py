"""Tasks of kind "iterations": quality and cost of the triplets that rank-dAD finds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch

from outergrad.launch.errors import RecipeError
from outergrad.linalg.compress import compress
from outergrad.linalg.low_rank import LowRank
from outergrad.linalg.subspace import OVERSAMPLING
from outergrad_lab.experiments.capture import Captured, capture, formed
from outergrad_lab.experiments.task import Context, at_least

T = TypeVar("T")

COUNTS = (1, 2, 4, 8, 16, 32)
TOLERANCES = (3e-1, 1e-1, 1e-2, 1e-3, 1e-4)
CONSECUTIVE = 4
"""Consecutive steps that are kept, so that a warm start gets warm."""
REPEATS = (3, 9)
"""Least number of timed calls, and most of them if they are short."""
REPEATING_S = 0.1
WORKLOADS_IN_FACTORS = ("mlp", "deep-mlp", "gru", "lstm")
"""Workloads with data, all of whose weights have a gradient of two factors in one group."""


@dataclass(frozen=True)
class Trial:
    """One way to find triplets.

    Attributes:
        way: A key of `WAYS`.
        iterations: As in `og.RankDAD`; None for the solver's own.
        tolerance: As in `og.RankDAD`; None for all triplets of the rank.
    """

    way: str
    iterations: int | None = None
    tolerance: float | None = None


@dataclass(frozen=True, kw_only=True)
class IterationsWork:
    """Compresses gradients of a real training in every way of `TRIALS`.

    Attributes:
        workload: One of `WORKLOADS_IN_FACTORS`.
        batch_size: Rows per step.
        rank: Number of triplets to find.
        largest_rank: Rank that the layers must be large enough for, so that means for several
            ranks are over the same layers.
        steps: Steps of exact training at one site before.
        seed: Seed of that training.
    """

    workload: str
    batch_size: int = at_least(1)
    rank: int = at_least(1)
    largest_rank: int = 0
    steps: int = at_least(CONSECUTIVE, 50)
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses workloads whose gradients are more than two factors."""
        if self.workload not in WORKLOADS_IN_FACTORS:
            known = ", ".join(WORKLOADS_IN_FACTORS)
            raise RecipeError(f"workload must be one of {known}, not {self.workload!r}")

    def run(self, context: Context) -> dict[str, Any]:
        """Runs all trials; one step of progress for the training, and one per trial."""
        context.steps(1 + len(TRIALS))
        layers = self._layers(context)
        context.advance()
        rows: list[dict[str, Any]] = []
        for trial in TRIALS:
            rows += [_row(self, trial, layer) for layer in layers]
            context.advance()
        return {"rows": rows, "threads": torch.get_num_threads()}

    def _layers(self, context: Context) -> list[Captured]:
        """Returns layers with more triplets than are looked for: in others every way finds all."""
        training = self.workload, self.batch_size, self.steps, CONSECUTIVE, self.seed
        rank = max(self.rank, self.largest_rank) + OVERSAMPLING
        return [one for one in capture(*training, context.data_dir) if rank < one.largest_rank]


def _row(work: IterationsWork, trial: Trial, layer: Captured) -> dict[str, Any]:
    found, ms = timed(WAYS[trial.way](layer, work.rank, trial))
    error, best_error = _error(layer, found), _best_error(layer, found.rank)
    return {
        "case": f"{work.workload}, {work.batch_size} rows, {trial.way}",
        "layer": layer.name,
        "rank": work.rank,
        "way": trial.way,
        "swept": "iterations" if trial.tolerance is None else "tolerance",
        "iterations": trial.iterations,
        "tolerance": trial.tolerance,
        "error": error,
        "best_error": best_error,
        "ratio": error / best_error if best_error else None,
        "kept_rank": found.rank,
        "ms": ms,
    }


def timed(find: Callable[[], T], clock: Callable[[], float] = time.perf_counter) -> tuple[T, float]:
    """Returns the result, and the median milliseconds of calls by a clock, after a warm-up call."""
    found = find()
    times_s: list[float] = []
    while _wants_more(times_s):
        began = clock()
        find()
        times_s.append(clock() - began)
    return found, 1e3 * median(times_s)


def _wants_more(times_s: list[float]) -> bool:
    least, most = REPEATS
    return len(times_s) < least or (len(times_s) < most and sum(times_s) < REPEATING_S)


def _error(layer: Captured, found: LowRank) -> float:
    """Returns the Frobenius norm of the missing part, relative to the gradient."""
    missing_OI = layer.formed_OI - formed(found.factors())
    return (missing_OI.norm() / layer.sigma_K.norm()).item()


def _best_error(layer: Captured, rank: int) -> float:
    """Returns the least error of any approximation of the rank (Eckart and Young)."""
    return (layer.sigma_K[rank:].norm() / layer.sigma_K.norm()).item()


def _cold(layer: Captured, rank: int, trial: Trial, *, solver: Any) -> Callable[[], LowRank]:
    """Returns a start from random directions."""
    return partial(
        compress,
        layer.last,
        rank,
        trial.tolerance or 0.0,
        solver=solver,
        iterations=trial.iterations,
    )


def _warm(layer: Captured, rank: int, trial: Trial) -> Callable[[], LowRank]:
    """Returns a start from the step before, with as many spare directions as rank-dAD keeps."""
    columns = rank + max(OVERSAMPLING, rank // 2)
    find = partial(compress, rank=columns, solver="subspace_iteration", iterations=trial.iterations)
    q_GIR = None
    for gradient in layer.steps[:-1]:
        q_GIR = find(gradient, q_GIR=q_GIR).a_GRI.mT
    return lambda: find(layer.last, q_GIR=q_GIR).leading(rank)


WAYS: dict[str, Callable[[Captured, int, Trial], Callable[[], LowRank]]] = {
    "block": partial(_cold, solver="subspace_iteration"),
    "block, warm": _warm,
    "one by one": partial(_cold, solver="power_iteration"),
}
"""All directions at once, as in rank-dAD, or one by one with deflation, as in the paper."""


TRIALS = (
    *(Trial(way, iterations=iterations) for way in WAYS for iterations in COUNTS),
    *(
        Trial(way, tolerance=tolerance)
        for way in ("block", "one by one")
        for tolerance in TOLERANCES
    ),
)
