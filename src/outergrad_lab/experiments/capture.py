"""Gradients of a real training, as the factors that a method is given to compress."""

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
from outergrad.tools.plan.link_time import as_settled
from outergrad_lab.data import Dataset, load
from outergrad_lab.training.optimizers import ADAM_EPS
from outergrad_lab.workloads import WORKLOADS

_EXACT = og.DAD(always=True, reveal="activations")


@dataclass(frozen=True)
class Captured:
    """The gradients of one weight.

    Attributes:
        name: Of the weight.
        steps: Its factors in consecutive steps.
        formed_OI: The last one as it is, float64.
        sigma_K: Its singular values, falling, float64.
    """

    name: str
    steps: tuple[Factors, ...]
    formed_OI: Tensor
    sigma_K: Tensor

    @property
    def last(self) -> Factors:
        """Of the last step."""
        return self.steps[-1]

    @property
    def largest_rank(self) -> int:
        """Min(N, I, O)."""
        return min(len(self.sigma_K), self.last.d_GRO.shape[1])


class _Watched(DADCompressor):
    """Exact, and remembers what it was given."""

    def __init__(self) -> None:
        super().__init__(_EXACT)
        self.given: dict[str, Factors] = {}

    def compress(self, parts: Sequence[Part]) -> list[Factors]:
        """As it is."""
        for part in parts:
            assert isinstance(part.gradient, Factors)
            d_GRO, a_GRI, _ = part.gradient
            self.given[place_name(part.slot.place)] = Factors(
                d_GRO.detach().clone(), a_GRI.detach().clone()
            )
        return super().compress(parts)


@dataclass(frozen=True)
class _Watching:
    """A method whose exchange can be asked."""

    watched: _Watched = field(default_factory=_Watched)

    def compressor(self) -> _Watched:
        """The one there is."""
        return self.watched


@lru_cache(maxsize=1)
def capture(
    workload: str, batch_size: int, steps: int, last: int, seed: int, data_dir: Path
) -> tuple[Captured, ...]:
    """Trains at one site, with exact gradients.

    Args:
        workload: A key of `WORKLOADS` with data.
        batch_size: Rows per step.
        steps: How many.
        last: Of how many at the end the factors are kept.
        seed: Of the weights and the batches.
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
    """The gradient itself, (O, I), of the only group that there is, in float64."""
    return gradient.d_GRO[0].double().mT @ gradient.a_GRI[0].double()
