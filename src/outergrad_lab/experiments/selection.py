"""Tasks of kind "selection": the cost of finding the largest entries of a gradient."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outergrad.launch.errors import RecipeError
from outergrad.linalg.selection import STAGE_DENSITY, above, random_k, threshold, top_blocks, top_k
from outergrad_lab.experiments.capture import capture
from outergrad_lab.experiments.iterations import CONSECUTIVE, WORKLOADS_IN_FACTORS, timed
from outergrad_lab.experiments.task import Context, at_least

BLOCK = 64
LEAST_NUMEL = 100_000
"""Least number of entries; for smaller gradients the time is that of starting operations."""


@dataclass(frozen=True, kw_only=True)
class SelectionWork:
    """Finds the largest entries in every way of `WAYS`.

    Times are those of the processor, all threads together: another program may run beside it.

    Attributes:
        density: Share of the entries to find.
        workload: One of `WORKLOADS_IN_FACTORS`, whose gradients are used; or
        drawn: Number of entries of a heavy-tailed distribution, in place of a workload.
        batch_size: Rows per step of the workload.
        steps: Steps of its training at one site before.
        seed: Seed of that training, or of the drawn entries.
    """

    density: float
    workload: str | None = None
    drawn: int | None = at_least(1, None)
    batch_size: int = at_least(1, 32)
    steps: int = at_least(CONSECUTIVE, 50)
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.workload is None) == (self.drawn is None):
            raise RecipeError("give either workload or drawn")
        if self.workload is not None and self.workload not in WORKLOADS_IN_FACTORS:
            known = ", ".join(WORKLOADS_IN_FACTORS)
            raise RecipeError(f"workload must be one of {known}, not {self.workload!r}")
        if self.density > 1:
            raise RecipeError(f"density must be at most 1, not {self.density!r}")

    @property
    def case(self) -> str:
        """Heading of the searched entries."""
        if self.workload is None:
            return f"{self.drawn:,} drawn entries"
        return f"{self.workload}, {self.batch_size} rows"

    def run(self, context: Context) -> dict[str, Any]:
        """Runs all ways; one step of progress for the gradients, and one per way."""
        context.steps(1 + len(WAYS))
        gradients = self._gradients(context)
        context.advance()
        rows: list[dict[str, Any]] = []
        for way in WAYS:
            rows += [self._row(way, gradient) for gradient in gradients]
            context.advance()
        return {"rows": rows, "threads": torch.get_num_threads()}

    def _gradients(self, context: Context) -> list[_Gradient]:
        if self.workload is None:
            assert self.drawn is not None
            return [_Gradient("drawn", heavy_tailed(self.drawn, self.seed))]
        training = self.workload, self.batch_size, self.steps, CONSECUTIVE, self.seed
        found = capture(*training, context.data_dir)
        flat = [_Gradient(one.name, one.formed_OI.float().flatten()) for one in found]
        return [one for one in flat if len(one.flat) >= LEAST_NUMEL]

    def _row(self, way: str, gradient: _Gradient) -> dict[str, Any]:
        flat = gradient.flat
        wanted = max(1, round(self.density * len(flat)))
        places_K, ms = timed(lambda: WAYS[way](flat, wanted), time.process_time)
        return {
            "case": self.case,
            "way": way,
            "layer": gradient.name,
            "picked": len(places_K) / wanted,
            "norm_share": (flat[places_K].norm() / flat.norm()).item(),
            "ms": ms,
        }


class _Gradient(NamedTuple):
    name: str
    flat: Tensor


def heavy_tailed(numel: int, seed: int) -> Tensor:
    """Draws from a double gamma distribution of shape 0.5: SIDCo's model of a gradient."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(2, numel, generator=generator)
    return normal[0].square() * normal[1].sign()  # χ² of one degree of freedom is that gamma


def _by_topk(flat: Tensor, k: int) -> Tensor:
    return flat.abs().topk(k, sorted=False).indices


def _uncounted(flat: Tensor, k: int) -> Tensor:
    """Returns, as in the paper, all entries above the threshold of the staged fits."""
    share = k / len(flat)
    stages = max(1, math.ceil(math.log(share) / math.log(STAGE_DENSITY)))
    return (flat.abs() > threshold(flat, share, stages=stages)).nonzero().view(-1)


def _blocks(flat: Tensor, k: int) -> Tensor:
    return top_blocks(flat, k, BLOCK)


def _random(flat: Tensor, k: int) -> Tensor:
    return random_k(len(flat), k, seed=0)


WAYS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "torch.topk": _by_topk,
    "topk": top_k,
    "threshold": above,
    "threshold, uncounted": _uncounted,
    "blocks": _blocks,
    "random": _random,
}
"""Names of `og.Sparse(select=)`, PyTorch's own sort, and SIDCo's threshold as published."""
