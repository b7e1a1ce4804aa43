"""Bounds hold, and are what the gradient reaches where only rows, widths and bottlenecks limit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from cases import Branches, mlp
from outergrad.spectra import Limit, RankBound, numerical_rank, rank_bounds
from ranks import run_on_lasting_groups


def line(*widths: int, bias: bool = False) -> nn.Sequential:
    """Linear layers without anything between them."""
    return nn.Sequential(*(nn.Linear(i, o, bias) for i, o in pairwise(widths)))


def both(y: Tensor, b: nn.Module, c: nn.Module) -> Tensor:
    """A product that two layers read: its delta has the directions of both."""
    return torch.cat([b(y), c(y).tanh()], dim=1)


@dataclass
class Case:
    """A model, a batch, and the expected bound of each weight, with what sets it."""

    model: Callable[[], nn.Module]
    x: Callable[[], Tensor]
    bounds: dict[str, tuple[int, Limit]]


ROWS, INPUTS, OUTPUTS, NECK = Limit.ROWS, Limit.INPUTS, Limit.OUTPUTS, Limit.BOTTLENECK
BRANCH = {"a": nn.Linear(9, 8, bias=False), "b": nn.Linear(8, 2), "c": nn.Linear(8, 8)}
CASES = {
    "rows": Case(
        lambda: mlp(9, 8, 7),
        lambda: torch.randn(3, 9),
        {"0.weight": (3, ROWS), "2.weight": (3, ROWS)},
    ),
    "widths": Case(
        lambda: mlp(9, 8, 12),
        lambda: torch.randn(20, 9),
        {"0.weight": (8, OUTPUTS), "2.weight": (8, INPUTS)},
    ),
    "positions": Case(
        lambda: mlp(9, 8, 7),
        lambda: torch.randn(2, 2, 9),
        {"0.weight": (4, ROWS), "2.weight": (4, ROWS)},
    ),
    "bottleneck": Case(
        lambda: line(9, 8, 2, 8, 7),
        lambda: torch.randn(20, 9),
        {f"{k}.weight": (2, (NECK, OUTPUTS, INPUTS, NECK)[k]) for k in range(4)},
    ),
    "bottleneck, with biases": Case(
        lambda: line(9, 8, 2, 8, 7, bias=True),
        lambda: torch.randn(20, 9),
        {
            "0.weight": (2, NECK),
            "1.weight": (2, OUTPUTS),
            "2.weight": (2, INPUTS),
            "3.weight": (3, NECK),
        },
    ),
    "a nonlinearity ends it": Case(
        lambda: nn.Sequential(*line(9, 8, 2), nn.Tanh(), *line(2, 8, 7)),
        lambda: torch.randn(20, 9),
        {
            "0.weight": (2, NECK),
            "1.weight": (2, OUTPUTS),
            "3.weight": (2, INPUTS),
            "4.weight": (2, NECK),
        },
    ),
    "in place": Case(
        lambda: nn.Sequential(nn.Linear(9, 2), nn.ReLU(inplace=True), nn.Linear(2, 8), nn.Tanh()),
        lambda: torch.randn(20, 9),
        {"0.weight": (2, OUTPUTS), "2.weight": (2, INPUTS)},
    ),
    "two that read it": Case(
        lambda: Branches(lambda m, x: both(m.a(x), m.b, m.c), **BRANCH),
        lambda: torch.randn(20, 9),
        {"a.weight": (8, OUTPUTS), "b.weight": (2, OUTPUTS), "c.weight": (8, OUTPUTS)},
    ),
    "uses add up": Case(
        lambda: Branches(lambda m, x: m.a(m.a(x).tanh()), a=nn.Linear(9, 9)),
        lambda: torch.randn(3, 9),
        {"a.weight": (6, ROWS)},
    ),
    "convolution": Case(
        lambda: nn.Conv2d(3, 12, 3, stride=2),
        lambda: torch.randn(2, 3, 5, 5),
        {"weight": (8, ROWS)},
    ),
    "convolution, few channels": Case(
        lambda: nn.Conv2d(3, 5, 3, padding=1),
        lambda: torch.randn(2, 3, 5, 5),
        {"weight": (5, OUTPUTS)},
    ),
    "time": Case(
        lambda: Branches(lambda m, x: m.rnn(x)[0], rnn=nn.RNN(9, 8, batch_first=True)),
        lambda: torch.randn(2, 3, 9),
        {"rnn.weight_ih_l0": (6, ROWS), "rnn.weight_hh_l0": (6, ROWS)},
    ),
    "ids": Case(
        lambda: nn.Embedding(20, 9),
        lambda: torch.tensor([[3, 3, 4], [4, 5, 5]]),
        {"weight": (3, ROWS)},
    ),
}


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    y = model(x)
    (y * torch.randn_like(y)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CASES)
def test_bounds_are_as_expected_and_hold(name):
    torch.manual_seed(0)
    case = CASES[name]
    model, x = case.model().double(), case.x()
    x = x.double() if x.is_floating_point() else x
    found = {bound.weight: bound for bound in rank_bounds(model, x)}
    assert {n: (bound.bound, bound.limit) for n, bound in found.items()} == case.bounds
    for weight, gradient in gradients(model, x).items():
        if weight in found:
            assert numerical_rank(gradient.flatten(1)) <= found[weight].bound


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("in place", "time")])
def test_bounds_are_reached(name):
    """Of a recurrent layer the hidden state begins with zeros, which have no rank."""
    torch.manual_seed(0)
    case = CASES[name]
    model, x = case.model().double(), case.x()
    x = x.double() if x.is_floating_point() else x
    found = {bound.weight: bound.bound for bound in rank_bounds(model, x)}
    formed = gradients(model, x)
    assert {n: numerical_rank(formed[n].flatten(1)) for n in found} == found


def test_a_weight_that_is_used_elsewhere_has_its_shape_alone():
    forward = lambda m, x: m.a(x) + x @ m.a.weight.T  # noqa: E731
    (found,) = rank_bounds(Branches(forward, a=nn.Linear(9, 8)), torch.randn(2, 9))
    assert found == RankBound(weight="a.weight", bound=8, limit=OUTPUTS, rows=None)


def test_a_layer_without_a_rule_has_its_shape_alone():
    found = rank_bounds(nn.Bilinear(3, 4, 5), torch.randn(2, 3), torch.randn(2, 4))
    assert [(f.bound, f.rows) for f in found] == [(5, None)]


def test_tied_weights_have_one_bound_over_all_uses():
    model = mlp(9, 9, 9)
    model[2].weight = model[0].weight
    (found,) = rank_bounds(model, torch.randn(2, 9))
    assert found == RankBound(weight="0.weight", bound=4, limit=ROWS, rows=4)


def test_frozen_weights_and_vectors_have_none():
    model = mlp(9, 8, 7)
    model[0].requires_grad_(False)
    assert [found.weight for found in rank_bounds(model, torch.randn(2, 9))] == ["2.weight"]


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    before, drawn = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    rank_bounds(model, torch.randn(0, 4).new_ones(3, 4))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert [type(m) for m in model] == [nn.Linear, nn.BatchNorm1d, nn.Dropout, nn.Linear]


def test_a_distributed_model_has_the_same_bounds():
    model, x = line(9, 8, 2, 8), torch.randn(20, 9)
    plain = rank_bounds(model, x)

    def body(rank, group):
        own = copy.deepcopy(model)
        session = og.distribute(own, og.DAD(), group=group)
        found = rank_bounds(own, x)
        own(x).sum().backward()
        session.detach()
        return found

    assert run_on_lasting_groups(2, body) == [plain, plain]


def test_outputs_in_any_object_are_found():
    class Told:
        def __init__(self, y):
            self.y = y

    model = Branches(lambda m, x: {"told": Told(m.a(x))}, a=nn.Linear(9, 8))
    (found,) = rank_bounds(model, torch.randn(2, 9))
    assert found.bound == 2


def test_a_forward_without_gradients_is_refused():
    model = Branches(lambda m, x: m.a(x).detach(), a=nn.Linear(9, 8))
    with pytest.raises(ValueError, match="returns no tensor with a gradient"):
        rank_bounds(model, torch.randn(2, 9))
