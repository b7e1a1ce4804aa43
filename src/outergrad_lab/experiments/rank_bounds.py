"""Tasks of kind "rank-bounds": ranks of gradients beside the bounds that an architecture sets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from outergrad.launch.errors import RecipeError
from outergrad.linalg.leading import effective_rank
from outergrad.spectra import numerical_rank, rank_bounds
from outergrad_lab.data import Dataset, load
from outergrad_lab.experiments.task import Context, at_least

NECK = 4
"""Units of the narrowest layer."""
_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class RankBoundsWork:
    """Trains a network in one process, and measures the ranks of gradients at the end.

    Attributes:
        net: One of `NETS`.
        degree: What varies: the slope of leaky ReLUs, kept time steps, or the stride.
        steps: Steps of Adam before.
        rows: Rows of the batch whose gradient is measured.
        lr: Rate of Adam.
        seed: Seed of weights and batches.
    """

    net: str
    degree: float
    steps: int = at_least(0)
    rows: int = at_least(1, _ROWS)
    lr: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses names that are not known."""
        if self.net not in NETS:
            raise RecipeError(f"net must be one of {', '.join(NETS)}, not {self.net!r}")

    def run(self, context: Context) -> dict[str, Any]:
        """Trains, in one step of progress per step of training."""
        net = NETS[self.net]
        data = load(net.data, context.data_dir).mapped(lambda x: net.inputs(x, self.degree))
        context.steps(self.steps)
        torch.manual_seed(self.seed)
        model = net.build(self.degree)
        generator = torch.Generator().manual_seed(self.seed)
        optimizer = Adam(model.parameters(), lr=self.lr)
        for _ in range(self.steps):
            optimizer.zero_grad()
            _loss(model, *_drawn(data, _ROWS, generator)).backward()
            optimizer.step()
            context.advance()
        return {"rows": self._measured(model, *_drawn(data, self.rows, generator))}

    def _measured(self, model: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Any]]:
        """Returns a row per weight. Gradients are in float64, ranks count float32's rounding."""
        own = copy.deepcopy(model).double()
        own.zero_grad()
        _loss(own, x.double(), y).backward()
        rows = []
        for bound in rank_bounds(own, x.double()):
            gradient = own.get_parameter(bound.weight).grad
            assert gradient is not None
            matrix = gradient.flatten(1)
            rank = numerical_rank(matrix, torch.float32)
            if rank > bound.bound:
                raise RuntimeError(f"{bound.weight}: rank {rank} is above the bound {bound.bound}")
            found = effective_rank(torch.linalg.svdvals(matrix)[None]).item()
            about = {"layer": bound.weight, "rank_bound": bound.bound, "counted_rank": rank}
            rows.append({**about, "whole_effective_rank": found})
        return rows


@dataclass(frozen=True)
class Net:
    """A network of which something varies.

    Attributes:
        data: Name of its data set.
        build: Makes it for a value.
        inputs: Makes its inputs from those of the data set, for a value.
    """

    data: str
    build: Callable[[float], nn.Module]
    inputs: Callable[[Tensor, float], Tensor]


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


def _drawn(data: Dataset, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    rows = torch.randint(len(data.x_train), (count,), generator=generator)
    return data.x_train[rows], data.y_train[rows]


def _bottleneck(slope: float) -> nn.Sequential:
    """Linear layers without biases, of which one is narrow, with leaky ReLUs between them."""
    widths = (784, 64, NECK, 64, 10)
    layers: list[nn.Module] = []
    for k in range(4):
        layers.append(nn.Linear(widths[k], widths[k + 1], bias=False))
        if k < 3:
            layers.append(nn.Identity() if slope == 1 else nn.LeakyReLU(slope))
    return nn.Sequential(*layers)


class _Recurrent(nn.Module):
    """A recurrent layer with tied weights over time, and a linear one on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(13, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def _convolution(stride: float) -> nn.Sequential:
    """A convolution of wide patches, of which larger strides leave fewer positions."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 8, stride=int(stride)),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


NETS = {
    "bottleneck": Net("mnist", _bottleneck, lambda x, _: x.flatten(1)),
    "recurrent": Net(
        "spoken-digits", lambda _: _Recurrent(), lambda x, kept: x[:, 10 : 10 + int(kept)]
    ),
    "convolution": Net("mnist", _convolution, lambda x, _: x.reshape(-1, 1, 28, 28)),
}
"""Networks by name: what varies is the slope, the number of time steps, and the stride."""
