"""Optimizers by name step as PyTorch's do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from outergrad_lab.training.job import ADAM_EPS, OPTIMIZERS, optimizer_of


class SignOfTheGradient(SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad = p.grad.sign()
        return super().step(closure)


EXPECTED = {
    "adam": partial(Adam, eps=ADAM_EPS),
    "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "sign": SignOfTheGradient,
}


def steps(make) -> torch.Tensor:
    weight = nn.Parameter(torch.ones(3))
    optimizer = make([weight], lr=0.1)
    for k in range(3):
        weight.grad = torch.tensor([1.0, -2.0, 0.5 * k])
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_a_name(name):
    assert steps(partial(optimizer_of, name)).equal(steps(EXPECTED[name]))


def test_momentum_makes_larger_steps():
    plain, heavy = (steps(OPTIMIZERS[name]) for name in ("sgd", "momentum"))
    assert (heavy - 1).abs()[:2].gt(1.5 * (plain - 1).abs()[:2]).all()
