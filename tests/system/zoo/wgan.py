"""A Wasserstein GAN with a gradient penalty: its critic's loss holds a gradient.

Source: Gulrajani et al., arXiv 1704.00028, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WIDTH, NOISE, PENALTY = 8, 4, 10.0


@dataclass(frozen=True)
class Samples:
    """Of a site and a step; rows are alike in number.

    Attributes:
        real: what is to be imitated.
        noise: what the imitation is made of.
        between: of each row, where the penalty looks between the two.
    """

    real: Tensor
    noise: Tensor
    between: Tensor

    def double(self) -> Samples:
        return Samples(self.real.double(), self.noise.double(), self.between.double())


def gan() -> nn.ModuleDict:
    """Normalised by layers: a penalty per row leaves no room for batch norms."""
    torch.manual_seed(0)
    critic = [nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 1)]
    generator = [nn.Linear(NOISE, 16), nn.Tanh(), nn.Linear(16, WIDTH)]
    return nn.ModuleDict({"critic": nn.Sequential(*critic), "generator": nn.Sequential(*generator)})


def samples(site: int, step: int) -> Samples:
    source = torch.Generator().manual_seed(100 * step + site)
    rows = 5 + site
    real = torch.randn(rows, WIDTH, generator=source) * torch.linspace(0.2, 2, WIDTH)
    noise = torch.randn(rows, NOISE, generator=source)
    return Samples(real, noise, torch.rand(rows, 1, generator=source))


def critic_loss(models: nn.ModuleDict, x: Samples) -> Tensor:
    """How well it tells imitations, and how far its slope between them is from one."""
    fake = models["generator"](x.noise).detach()
    mixed = torch.lerp(fake, x.real, x.between).requires_grad_()
    (slope,) = torch.autograd.grad(models["critic"](mixed).sum(), mixed, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return models["critic"](fake).mean() - models["critic"](x.real).mean() + PENALTY * penalty


def generator_loss(models: nn.ModuleDict, x: Samples) -> Tensor:
    return -models["critic"](models["generator"](x.noise)).mean()


LOSSES = {"critic": critic_loss, "generator": generator_loss}


def turns() -> Iterator[tuple[str, int]]:
    """Which model learns, from which batch: the critic two times as often."""
    for step in range(6):
        yield ("generator" if step % 3 == 2 else "critic"), step
