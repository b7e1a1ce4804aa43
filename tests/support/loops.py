"""Training loops as users of DDP write them: a table of methods, a model, a pooled reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import outergrad as og
from covering import LONG, rest_slow

METHODS: dict[str, Any] = {
    "dense": og.Dense(),
    "dad": og.DAD(always=True),
    "dad raw": og.DAD(always=True, reveal="activations"),
    "gather": og.RankDAD(rank=8),
    "two_way": og.RankDAD(rank=8, reduce="two_way"),
    "all_reduce": og.RankDAD(rank=8, reduce="all_reduce"),
    "powersgd": og.PowerSGD(rank=8, min_ratio=1),
    "sparse": og.Sparse(density=1.0, always=True),
    "random blocks": og.Sparse(density=1.0, select="random_blocks", always=True),
    "edad": og.EDAD(blocks=["block"], always=True),
    "per layer": og.PerLayer({"first.*": og.DAD(always=True), "*": og.RankDAD(rank=8)}),
}
"""Exact for batches of which all sites together have at most eight rows, but for rounding."""

VARIANTS = {"dad", "gather", "all_reduce"}
"""Methods whose way a loop meets in "dad raw", in "per layer" and in "powersgd", too."""

SOME = rest_slow(
    [name for name in METHODS if LONG or name not in VARIANTS],
    ["dense", "dad raw", "two_way", "powersgd", "sparse", "edad"],
)
"""All but the variants, which need OUTERGRAD_LONG=1."""

INPUTS, OUTPUTS = 40, 12


class Net(nn.Module):
    """Layers, a block, a norm; wide enough that eight triplets are fewer bytes than a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(INPUTS, 48), nn.LayerNorm(48)
        self.block = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48))
        self.last = nn.Linear(48, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return self.last(self.norm(h + self.block(h)))


def _built() -> Net:
    torch.manual_seed(0)
    return Net()


def _first_calls() -> None:
    """In 16 bits; threads that share them may be wrong by hundredths in their first step."""
    for dtype in (torch.bfloat16, torch.float16):
        for rows in (1, 3):
            with torch.autocast("cpu", dtype=dtype):
                loss = _built()(torch.ones(rows, INPUTS)).square().mean()
            loss.backward()


_NET = _built()
_first_calls()


def net() -> Net:
    """The same on every call; threads share one random stream, so none is drawn there."""
    return copy.deepcopy(_NET)


def batch(site: int, step: int, rows: int = 3) -> Tensor:
    """What a site has in a step."""
    generator = torch.Generator().manual_seed(1000 * step + site)
    return torch.randn(rows, INPUTS, generator=generator)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A mean over the rows."""
    return (model(x) ** 2).mean() + model(x).sin().mean()


def pooled(
    step: Callable[[nn.Module, torch.optim.Optimizer], None],
    batches: Sequence[Sequence[tuple[float, Tensor]]],
    optimizer: Callable[[Any], torch.optim.Optimizer],
) -> list[Tensor]:
    """Parameters, in float64, after training on what all sites have together.

    Args:
        step: what the loop does after backward.
        batches: per step, of every batch its weight and its rows.
        optimizer: makes one of parameters.
    """
    model = net().double()
    made = optimizer(model.parameters())
    for members in batches:
        made.zero_grad()
        for weight, x in members:
            (weight * loss_of(model, x.double())).backward()
        step(model, made)
    return [p.detach() for p in model.parameters()]


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], limit: float) -> None:
    """By the relative Frobenius norm."""
    for k, (p, q) in enumerate(zip(found, expected, strict=True)):
        error = ((p.double() - q).norm() / q.norm()).item()
        assert error < limit, (k, error)
