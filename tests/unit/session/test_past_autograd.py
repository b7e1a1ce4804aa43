"""Functions whose backward adds to a gradient itself, and gives autograd None."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from covering import covering
from loops import METHODS, SOME
from ranks import run_on_lasting_groups

pytestmark = pytest.mark.usefixtures("large_matrices")

SITES, WIDTH = 2, 32


@pytest.fixture(params=SOME)
def method(request):
    chosen = METHODS[request.param]
    if isinstance(chosen, og.EDAD | og.PerLayer):
        pytest.skip("a block, or a mixture, of another model")
    return chosen


def _assign(p: Any, found: Tensor) -> None:
    p.main_grad = found + getattr(p, "main_grad", 0.0)


MAIN_GRAD = {
    "added": lambda p, found: p.main_grad.add_(found),
    "past its count of changes": lambda p, found: p.main_grad.data.add_(found),
    "replaced": _assign,
    "made": _assign,
}


class Fused(torch.autograd.Function):
    """A product; as libraries with fused accumulation, it adds the gradient where it belongs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, into: list[Any], where: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        (ctx.into,), ctx.where = into, where
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor) -> Any:
        (delta,), (x, weight) = deltas, ctx.saved_tensors
        found, p = delta.t() @ x, ctx.into
        if ctx.where == "returned":
            return delta @ weight, found, None, None
        if ctx.where in MAIN_GRAD:
            MAIN_GRAD[ctx.where](p, found)
        elif p.grad is None:
            p.grad = found
        elif ctx.where == "grad, past its count of changes":
            p.grad.data.add_(found)
        else:
            p.grad.add_(found)
        return delta @ weight, None, None, None


class Net(nn.Module):
    """Layers that share weights with fused products, before and behind all others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
        self.where, self.reaches = "grad", True

    def fused(self, x: Tensor, p: nn.Parameter) -> Tensor:
        return Fused.apply(x, p if self.reaches else p.detach(), [p], self.where)  # type: ignore[return-value]


class Inside(Net):
    """The fused products' backward comes between those of the layers."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fused(self.first(x).tanh(), self.own).tanh()
        return self.middle(self.fused(h, self.first.weight).tanh())


class AtTheEnd(Net):
    """Its backward comes before anything is heard of the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(self.middle(self.first(x).tanh()).tanh(), self.first.weight)


torch.manual_seed(4)
NETS = {"inside": Inside(), "at the end": AtTheEnd()}
ROWS = [torch.randn(2, WIDTH) for _ in range(SITES)]


def expected(model: nn.Module, times: int = 1) -> list[Tensor]:
    model = copy.deepcopy(model).double()
    model.where, model.reaches = "returned", True
    for x in ROWS:
        (times * model(x.double()).square().mean() / SITES).backward()
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


def assert_exact(found: list[Tensor], place: str, times: int = 1) -> None:
    names = [name for name, _ in NETS[place].named_parameters()]
    for name, g, q in zip(names, found, expected(NETS[place], times), strict=True):
        assert (g.double() - q).norm() <= 2e-4 * q.norm(), name


@pytest.mark.parametrize(
    ("where", "place", "to_none"),
    covering(
        ["grad", "grad, past its count of changes"], list(NETS), [True, False], quick=2, every=2
    ),
)
def test_what_a_backward_adds_to_grad_is_shared(method, place, to_none, where):
    def body(rank: int, group: Any) -> list[list[Tensor]]:
        model, found = copy.deepcopy(NETS[place]), []
        model.where = where
        session = og.distribute(model, method, group=group)
        for _ in range(4):
            model.zero_grad(set_to_none=to_none)
            model(ROWS[rank]).square().mean().backward()
            found.append([g.clone() for g in gradients(model)])
        session.detach()
        return found

    for steps in run_on_lasting_groups(SITES, body):
        for found in steps:
            assert_exact(found, place)


@pytest.mark.parametrize("place", NETS)
@pytest.mark.parametrize("both_travel", [True, False])
def test_passes_that_add_up_have_it_too(method, place, both_travel):
    def body(rank: int, group: Any) -> list[Tensor]:
        model = copy.deepcopy(NETS[place])
        session = og.distribute(model, method, group=group)
        with nullcontext() if both_travel else session.no_sync():
            model(ROWS[rank]).square().mean().backward()
        model(ROWS[rank]).square().mean().backward()
        session.detach()
        return gradients(model)

    for found in run_on_lasting_groups(SITES, body):
        assert_exact(found, place, times=2)


@pytest.mark.parametrize(
    ("how", "place", "synchronised"),
    covering(list(MAIN_GRAD), list(NETS), {"shared": True, "no_sync": False}, quick=2, every=2),
)
def test_main_grad_is_refused(method, place, how, synchronised):
    def body(rank: int, group: Any) -> None:
        model = copy.deepcopy(NETS[place])
        model.where = how
        for p in model.parameters() if how != "made" else ():
            p.main_grad = torch.zeros_like(p)  # type: ignore[attr-defined]
        session = og.distribute(model, method, group=group)
        session._loop.synchronise = synchronised
        with pytest.raises(RuntimeError, match="got a gradient in main_grad") as refused:
            model(ROWS[rank]).square().mean().backward()
        assert f"on site {rank}" in str(refused.value)
        assert "gradient_accumulation_fusion=False" in str(refused.value)
        model.zero_grad()
        session.detach()

    run_on_lasting_groups(SITES, body)


def test_gradients_of_what_the_backward_does_not_reach_are_refused(method):
    def body(rank: int, group: Any) -> None:
        model = copy.deepcopy(NETS["inside"])
        model.reaches = False
        session = og.distribute(model, method, group=group)
        with pytest.raises(RuntimeError, match="'own' got a gradient in a backward that does not"):
            model(ROWS[rank]).square().mean().backward()
        model.zero_grad()
        session.detach()

    run_on_lasting_groups(SITES, body)


@pytest.mark.parametrize("inputs", ["canonical", "raw"])
def test_what_a_backward_adds_to_a_weight_of_a_replayed_block_is_shared(inputs):
    def net() -> nn.Sequential:
        block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), block)

    def loss(model: nn.Module, x: Tensor, where: str) -> Tensor:
        weight = model[1][2].weight
        return Fused.apply(model(x), weight, [weight], where).square().mean()

    torch.manual_seed(5)
    start = net()
    pooled = copy.deepcopy(start).double()
    (sum(loss(pooled, x.double(), "returned") for x in ROWS) / SITES).backward()

    def body(rank: int, group: Any) -> list[list[Tensor]]:
        model, found = copy.deepcopy(start), []
        method = og.EDAD(blocks=["1"], inputs=inputs, always=True)
        session = og.distribute(model, method, group=group)
        for _ in range(4):
            model.zero_grad()
            loss(model, ROWS[rank], "grad").backward()
            found.append([g.clone() for g in gradients(model)])
        session.detach()
        return found

    for steps in run_on_lasting_groups(SITES, body):
        for found in steps:
            for g, p in zip(found, pooled.parameters(), strict=True):
                assert (g.double() - p.grad).norm() <= 2e-4 * p.grad.norm()
