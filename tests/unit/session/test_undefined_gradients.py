"""Weights that a backward reaches and gives no gradient: None at all sites stays None."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from covering import covering
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


OWES = 2e-5
"""Largest part of a gradient, in the norm, that a method at full rank leaves for the next step: a
hundred roundings of float32."""

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


def assert_same(
    found: list[Tensor | None], exact: list[Tensor | None], about: Any, owed: Sequence[float] = ()
) -> None:
    """`owed` is, for each parameter, the norm of what a step before may not have sent."""
    names = [name for name, _ in net().named_parameters()]
    for k, (name, g, q) in enumerate(zip(names, found, exact, strict=True)):
        if q is None and g is not None and owed:  # what it had not sent before is a gradient
            assert 0 < g.norm() < owed[k], (about, name)
            continue
        assert (g is None) == (q is None), (about, name)
        if g is not None and q is not None:
            assert (g.double() - q).norm() <= 2e-4 * q.norm(), (about, name)


@pytest.mark.parametrize("steps", covering(list(STEPS), quick=2))
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

    exact = [expected(losses, step) for step, losses in enumerate(STEPS[steps])]
    norms = [[0.0 if q is None else OWES * q.norm().item() for q in of] for of in exact]
    for found in run_on_lasting_groups(SITES, body):
        for step, gradients_of in enumerate(found):
            owes = isinstance(method, og.PowerSGD) and step > 0
            owed = [max(before) for before in zip(*norms[:step], strict=True)] if owes else ()
            assert_same(gradients_of, exact[step], step, owed)


def test_of_a_layer_that_was_not_called_zeros_may_stand_for_none(method):
    """The backward reaches its weight past the layer; nobody's gradient changes by it."""

    class Past(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).relu()
            h = h + NoneGiven.apply(h @ self.block[0].weight.t())
            return self.last(self.norm(h))

    def body(rank: int, group: Any) -> list[Tensor | None]:
        model = net()
        model.__class__ = Past
        session = og.distribute(model, method, group=group)
        loss_of(model, batch(rank, 0)).backward()
        session.detach()
        return gradients(model)

    whole = copy.deepcopy(net()).double()
    whole.__class__ = Past
    for site in range(SITES):
        (loss_of(whole, batch(site, 0).double()) / SITES).backward()
    names = [name for name, _ in whole.named_parameters()]
    for found in run_on_lasting_groups(SITES, body):
        for name, g, q in zip(names, found, gradients(whole), strict=True):
            if q is None:
                assert g is None or not g.any(), name
            else:
                assert g is not None
                assert (g.double() - q).norm() <= 2e-4 * q.norm(), name


@pytest.mark.parametrize("every", [False, True], ids=["no_sync", "every"])
def test_passes_that_add_up(method, every):
    """What no pass at any site had a gradient for has none; what one had one for has the mean."""
    if every and isinstance(method, og.EDAD | og.PerLayer):
        pytest.skip("shares every time")

    def body(rank: int, group: Any) -> list[Tensor | None]:
        model = net()
        chosen = dataclasses.replace(method, every=2) if every else method
        session = og.distribute(model, chosen, group=group)
        first = [without_block, of_nothing][rank]
        if every:
            first(model, batch(rank, 0)).backward()
        else:
            with session.no_sync():
                first(model, batch(rank, 0)).backward()
        without_block(model, batch(rank, 0)).backward()
        session.detach()
        return gradients(model)

    model = copy.deepcopy(net()).double()
    for site, loss in [(0, without_block), (1, of_nothing), (0, without_block), (1, without_block)]:
        passes = 2 if every else 1  # which are averaged, or add up
        (loss(model, batch(site, 0).double()) / (passes * SITES)).backward()
    exact = [p.grad for p in model.parameters()]
    for found in run_on_lasting_groups(SITES, body):
        assert_same(found, exact, every)


def test_decay_leaves_them_alone_at_both_sites(method):
    def body(rank: int, group: Any) -> list[Tensor]:
        model = net()
        session = og.distribute(model, method, group=group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for step in range(3):
            optimizer.zero_grad()
            without_block(model, batch(rank, step)).backward()
            optimizer.step()
        session.detach()
        return [p.detach().clone() for p in model.parameters()]

    before = dict(net().named_parameters())
    first, second = run_on_lasting_groups(SITES, body)
    for name, p, q in zip(before, first, second, strict=True):
        assert torch.equal(p, q), name
        assert torch.equal(p, before[name]) == name.startswith("block"), name


def test_a_gradient_that_was_there_stays(method):
    def body(rank: int, group: Any) -> tuple[list[Tensor | None], list[Tensor | None]]:
        model = net()
        session = og.distribute(model, method, group=group)
        of_all(model, batch(rank, 0)).backward()
        before = gradients(model)
        of_nothing(model, batch(rank, 0)).backward()
        session.detach()
        return before, gradients(model)

    for before, after in run_on_lasting_groups(SITES, body):
        for p, q in zip(before, after, strict=True):
            assert p is not None
            assert q is not None
            assert (p - q).norm() <= 1e-5 * p.norm()
