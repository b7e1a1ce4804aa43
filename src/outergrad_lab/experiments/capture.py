"""Gradients of a real training, as the factors that a method has to compress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Adam

import outergrad as og
from outergrad.comm.mirror import MirrorComm
from outergrad.comm.trace import Tracer
from outergrad.core.types import Factors, Part, place_name
from outergrad.launch.links import ShapedLink
from outergrad.methods.dad import DADCompressor
from outergrad.session.attach import attach
from outergrad.tools.plan.network import as_settled
from outergrad_lab.data import Dataset, load
from outergrad_lab.training.job import ADAM_EPS
from outergrad_lab.workloads import WORKLOADS

_EXACT = og.DAD(always=True, reveal="activations")


@dataclass(frozen=True)
class Captured:
    """Gradients of one weight.

    Attributes:
        name: Name of the weight.
        steps: Factors of its gradient in consecutive steps.
        formed_OI: Gradient of the last of these steps, as a matrix, float64.
        sigma_K: Singular values of that gradient, falling, float64.
    """

    name: str
    steps: tuple[Factors, ...]
    formed_OI: Tensor
    sigma_K: Tensor

    @property
    def last(self) -> Factors:
        """Factors of the last step."""
        return self.steps[-1]

    @property
    def largest_rank(self) -> int:
        """Largest rank of the gradient: min(N, I, O)."""
        return min(len(self.sigma_K), self.last.d_GRO.shape[1])


class _Watched(DADCompressor):
    """A compressor without loss that remembers its inputs."""

    def __init__(self) -> None:
        super().__init__(_EXACT)
        self.given: dict[str, Factors] = {}

    def compress(self, parts: Sequence[Part]) -> list[Factors]:
        for part in parts:
            assert isinstance(part.gradient, Factors)
            d_GRO, a_GRI, _ = part.gradient
            self.given[place_name(part.slot.place)] = Factors(
                d_GRO.detach().clone(), a_GRI.detach().clone()
            )
        return super().compress(parts)


@dataclass(frozen=True)
class _Watching:
    """A method whose compressor can be inspected."""

    watched: _Watched = field(default_factory=_Watched)

    def compressor(self) -> _Watched:
        return self.watched


@lru_cache(maxsize=1)
def capture(
    workload: str, batch_size: int, steps: int, last: int, seed: int, data_dir: Path
) -> tuple[Captured, ...]:
    """Trains at one site with exact gradients, and returns the last of these.

    Args:
        workload: A key of `WORKLOADS` with data.
        batch_size: Rows per step.
        steps: Number of steps.
        last: Number of steps at the end whose factors are kept.
        seed: Seed of the weights and the batches.
        data_dir: Folder of the data sets.

    Returns:
        The gradients of every weight, in the order of backward.

    Raises:
        RecipeError: The data is not there.
    """
    recipe = WORKLOADS[workload]
    assert recipe.data is not None
    data = load(recipe.data, data_dir)
    torch.manual_seed(seed)
    model, watching = recipe.build(), _Watching()
    no_link = as_settled(ShapedLink(rate_bit_per_s=None))
    session = attach(model, watching, MirrorComm(1, Tracer()), no_link)
    optimizer = Adam(model.parameters(), lr=recipe.lr, eps=ADAM_EPS)
    kept: list[dict[str, Factors]] = []
    for step, (x, y) in enumerate(_batches(data, batch_size, steps, seed)):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if step >= steps - last:
            kept.append(dict(watching.watched.given))
    session.detach()
    return tuple(_captured(name, [given[name] for given in kept]) for name in kept[-1])


def _batches(
    data: Dataset, batch_size: int, steps: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(len(data.x_train), (batch_size,), generator=generator)
        yield data.x_train[rows], data.y_train[rows]


def _captured(name: str, steps: Sequence[Factors]) -> Captured:
    formed_OI = formed(steps[-1])
    return Captured(name, tuple(steps), formed_OI, torch.linalg.svdvals(formed_OI))


def formed(gradient: Factors) -> Tensor:
    """Returns the gradient as a matrix, (O, I), of the only group, in float64."""
    return gradient.d_GRO[0].double().mT @ gradient.a_GRI[0].double()
