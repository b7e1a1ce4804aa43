"""Weights that a backward reaches and gives no gradient: None at all sites stays None."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from loops import METHODS, SOME, Net, batch, loss_of, net
from ranks import run_on_lasting_groups

pytestmark = pytest.mark.usefixtures("large_matrices")

SITES = 2


@pytest.fixture(params=SOME)
def method(request):
    return METHODS[request.param]


def undefined(y: Tensor) -> Tensor:
    """The same, whose backward has no gradient."""
    return torch._C._functions.UndefinedGrad()(y)


class NoneGiven(torch.autograd.Function):
    """As a custom function whose backward returns None."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor) -> None:
        return None


def of_all(model: Net, x: Tensor) -> Tensor:
    return loss_of(model, x)


def of_nothing(model: Net, x: Tensor) -> Tensor:
    return undefined(loss_of(model, x))


def of_the_last(model: Net, x: Tensor) -> Tensor:
    h = model.first(x).relu()
    return model.last(undefined(model.norm(h + model.block(h)))).square().mean()


def without_block(model: Net, x: Tensor) -> Tensor:
    h = model.first(x).relu()
    return model.last(model.norm(h + NoneGiven.apply(model.block(h)))).square().mean()


def of_the_first(model: Net, x: Tensor) -> Tensor:
    return model.first(x).square().mean()


LOSSES = [of_all, of_nothing, of_the_last, without_block, of_the_first]
STEPS = {
    "everywhere nothing": [(of_nothing, of_nothing)],
    "nothing here, all there": [(of_nothing, of_all), (of_all, of_nothing)],
    "some layers": [(of_the_last, of_the_last), (without_block, without_block)],
    "other layers here than there": [(of_the_last, without_block), (of_nothing, of_the_first)],
    "after usual steps": [
        *[(of_all, of_all)] * 4,
        (without_block, without_block),
        (of_nothing, of_nothing),
        (of_all, of_all),
        (of_the_last, of_nothing),
        *[(of_all, of_all)] * 3,
    ],
    "always": [(without_block, without_block)] * 5,
}


def expected(losses: tuple[Any, ...], step: int) -> list[Tensor | None]:
    model = copy.deepcopy(net()).double()
    for site, loss in enumerate(losses):
        (loss(model, batch(site, step).double()) / SITES).backward()
    return [p.grad for p in model.parameters()]


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same(found: list[Tensor | None], exact: list[Tensor | None], about: Any) -> None:
    names = [name for name, _ in net().named_parameters()]
    for name, g, q in zip(names, found, exact, strict=True):
        assert (g is None) == (q is None), (about, name)
        if g is not None and q is not None:
            assert (g.double() - q).norm() <= 2e-4 * q.norm(), (about, name)


@pytest.mark.parametrize("steps", STEPS)
def test_what_no_site_has_a_gradient_for_has_none(method, steps):
    def body(rank: int, group: Any) -> list[list[Tensor | None]]:
        model, found = net(), []
        session = og.distribute(model, method, group=group)
        for step, losses in enumerate(STEPS[steps]):
            model.zero_grad()
            losses[rank](model, batch(rank, step)).backward()
            found.append(gradients(model))
        session.detach()
        return found

    for found in run_on_lasting_groups(SITES, body):
        for step, losses in enumerate(STEPS[steps]):
            assert_same(found[step], expected(losses, step), step)
