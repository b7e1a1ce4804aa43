"""Noise on the released sums of a private training whose samples add nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

import outergrad as og
from ranks import run_on_lasting_groups


def released_noise(
    private_of: Callable[[int], og.Private], sites: int, steps: int
) -> list[torch.Tensor]:
    """Returns the noise that each site has on the sum of each step, (steps, 8).

    Args:
        private_of: makes the transform of a site, by its rank.
        sites: S.
        steps: number of steps.
    """

    def body(rank, group):
        torch.manual_seed(0)
        model, private = nn.Linear(8, 1, bias=False), private_of(rank)
        session = og.distribute(model, og.Dense(), group=group, transform=private)
        found = []
        for _ in range(steps):
            model.zero_grad()
            (0.0 * model(torch.ones(1, 8)).mean()).backward()
            found.append(private.batch * model.weight.grad.flatten())
        session.detach()
        return torch.stack(found)

    return run_on_lasting_groups(sites, body)


def within(squares: float, count: int, deviation: float) -> bool:
    """True if a sum of squares is that of so many normal numbers: chi squared within 5 sigma."""
    return abs(squares / deviation**2 - count) < 5 * math.sqrt(2 * count)
