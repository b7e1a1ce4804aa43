"""Optimizers by name step as PyTorch's do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from outergrad.optim import Muon
from outergrad_lab.training.job import ADAM_EPS, OPTIMIZERS, decayed, optimizer_of


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
    "muon": partial(Muon, eps=ADAM_EPS),
    "muon-0.9": partial(Muon, eps=ADAM_EPS, momentum=0.9),
    "muon-bf16": partial(Muon, eps=ADAM_EPS, dtype=torch.bfloat16),
}


def steps(make) -> torch.Tensor:
    """Weights after three steps; `make` takes parameters."""
    weight = nn.Parameter(torch.ones(3))
    stepped(make([weight], lr=0.1), weight)
    return weight.detach()


def stepped(optimizer, weight) -> None:
    for k in range(3):
        weight.grad = torch.tensor([1.0, -2.0, 0.5 * k])
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_a_name(name):
    model = nn.ParameterList([nn.Parameter(torch.ones(3))])
    stepped(optimizer_of(name, model, 0.1), model[0])
    assert model[0].detach().equal(steps(EXPECTED[name]))


@pytest.mark.parametrize("name", ["muon", "muon-0.9", "muon-bf16"])
def test_muon_moves_the_hidden_matrices_alone(name):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = optimizer_of(name, model, 0.1).param_groups
    by_muon = {name for group in groups if group["matrices"] for name in group["param_names"]}
    assert by_muon == {"0.weight"}


@pytest.mark.parametrize(("name", "momentum"), [("muon", 0.95), ("muon-0.9", 0.9)])
def test_muon_has_the_momentum_that_its_name_tells(name, momentum):
    groups = optimizer_of(name, nn.Linear(3, 4), 0.1).param_groups
    assert {group["momentum"] for group in groups} == {momentum}


@pytest.mark.parametrize("share", [1.0, 0.1, 0.0])
def test_a_rate_decays_by_half_a_cosine_and_then_stays(share):
    weight = nn.Parameter(torch.ones(3))
    optimizer = SGD([weight], lr=0.5)
    schedule, rates = decayed(optimizer, 10, share), []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[0] == 0.5
    assert rates[5] == pytest.approx(0.5 * (1 + share) / 2)
    assert rates[10] == rates[11] == pytest.approx(0.5 * share)
    assert rates == sorted(rates, reverse=True)


def test_momentum_makes_larger_steps():
    plain, heavy = (steps(OPTIMIZERS[name]) for name in ("sgd", "momentum"))
    assert (heavy - 1).abs()[:2].gt(1.5 * (plain - 1).abs()[:2]).all()
