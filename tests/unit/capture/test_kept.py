"""Memory that somebody writes to or frees between a layer's own backward and its message."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from covering import covering
from loops import METHODS
from outergrad.capture import kept
from ranks import run_on_lasting_groups

pytestmark = pytest.mark.usefixtures("large_matrices")

SITES, WIDTH, ROWS = 2, 40, 3

BY: dict[str, Any] = {name: method for name, method in METHODS.items() if name != "edad"} | {
    "edad": og.EDAD(blocks=["first", "second", "last"], always=True),
    "edad, chains": og.EDAD(always=True),
    "auto": og.Auto(),
    "every other": og.DAD(always=True, every=2),
}
FACTORS = {name: BY[name] for name in ("dad", "dad raw", "gather", "two_way", "all_reduce", "edad")}


class _Handed(torch.autograd.Function):
    """The identity; backward returns what a function makes of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.make = make
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.make(grads[0]), None


def handed(x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    return _Handed.apply(x, make)  # type: ignore[return-value]


class Net(nn.Module):
    """Three layers behind each other and a sum, with places where others can meddle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.meddles: Callable[[], bool] = lambda: True

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        h = h + self.second(h).tanh()
        return self.last(h).sin()


class Workspace(Net):
    """The backwards of two functions return the same memory."""

    def forward(self, x: Tensor) -> Tensor:
        workspace = torch.empty(ROWS, WIDTH)

        def make(g: Tensor) -> Tensor:
            return self.fill(workspace, g) if self.meddles() else g

        h = handed(self.first(x), make).tanh()
        h = handed(self.second(h), make).tanh()
        return handed(self.last(h), make).sin()

    def fill(self, workspace: Tensor, g: Tensor) -> Tensor:
        return workspace.copy_(g)


class HiddenWorkspace(Workspace):
    """It is filled where no version counts."""

    def fill(self, workspace: Tensor, g: Tensor) -> Tensor:
        workspace.numpy()[:] = g.numpy()
        return workspace


class Branch(Net):
    """A branch doubles a gradient in place that another layer has, too."""

    def forward(self, x: Tensor) -> Tensor:
        def make(g: Tensor) -> Tensor:
            return g.mul_(2) if self.meddles() else g

        other = handed(x * 1, make)  # before the layers, so that it is behind them in backward
        return (self.second(self.first(x).tanh()) + other).sin() + self.last(x)


class ZeroedOutput(Net):
    """A hook zeroes the gradient of an output when the layer is done."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.first, self.second, self.last):
            layer.register_full_backward_hook(self.zero)

    def zero(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        if self.meddles():
            grad_output[0].zero_()


class Frees(Net):
    """A hook frees the input's memory when the layer is done."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[nn.Module, Tensor] = {}
        for layer in (self.second, self.last):
            layer.register_forward_hook(self.note)
            layer.register_full_backward_hook(self.done)

    def note(self, module: nn.Module, args: Any, output: Any) -> None:
        self.inputs[module] = args[0].detach()

    def done(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        x = self.inputs.pop(module)
        if self.meddles():
            self.spoil(x)

    def spoil(self, x: Tensor) -> None:
        x.untyped_storage().resize_(0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        h = self.second(h.clone()).tanh()
        return self.last(h.clone()).sin()


class FreesAndTakes(Frees):
    """The memory is freed and taken again, as where parameters are gathered."""

    def spoil(self, x: Tensor) -> None:
        size = x.untyped_storage().nbytes()
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(size)
        x.zero_()


class Overwrites(Frees):
    """An input is written to in place when the layer is done."""

    def spoil(self, x: Tensor) -> None:
        x.mul_(3)


class OverwritesHidden(Frees):
    """The same where no version counts."""

    def spoil(self, x: Tensor) -> None:
        x.data.mul_(3)


class Staged(Net):
    """Saved activations come back through one buffer, as where they are offloaded."""

    def forward(self, x: Tensor) -> Tensor:
        stage = torch.empty(ROWS, WIDTH)

        def back(t: Tensor) -> Tensor:
            if t.shape != stage.shape or not self.meddles():
                return t
            return stage.copy_(t).view_as(stage)

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), back):
            h = self.first(x).tanh().clone()
            h = self.second(h).relu()
            return self.last(h)


NETS: dict[str, Any] = {
    net.__name__: net
    for net in (
        Net,
        Workspace,
        HiddenWorkspace,
        Branch,
        ZeroedOutput,
        Frees,
        FreesAndTakes,
        Overwrites,
        OverwritesHidden,
        Staged,
    )
}


def made(net: Any) -> Any:
    model = net()
    model.load_state_dict(_WEIGHTS)
    return model


torch.manual_seed(0)
_WEIGHTS = copy.deepcopy(Net().state_dict())


def batch(rank: int, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=draw).requires_grad_()


@cache
def plain(net: Any, step: int) -> dict[str, Tensor]:
    """The mean over the sites of what plain PyTorch leaves."""
    total: dict[str, Tensor] = {}
    for rank in range(SITES):
        model = made(net)
        model(batch(rank, step)).square().mean().backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                total[name] = total.get(name, 0) + p.grad.double() / SITES
    return total


def assert_close(model: nn.Module, expected: dict[str, Tensor], where: Any) -> None:
    for name, p in model.named_parameters():
        if name in expected:
            assert p.grad is not None
            error = (p.grad.double() - expected[name]).norm() / expected[name].norm()
            assert error < 1e-4, (where, name, error)


@pytest.mark.parametrize(("by", "net"), covering(BY, NETS, quick=4, every=2))
def test_the_gradient_is_that_of_the_layers_own_backward(by, net):
    every = getattr(by, "every", 1)

    def body(rank: int, group: Any) -> None:
        model = made(net)
        session = og.distribute(model, by, group=group)
        for step in range(4):
            if step % every == 0:
                model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            if every == 1:
                assert_close(model, plain(net, step), step)
            elif (step + 1) % every == 0:
                both = [plain(net, s) for s in (step - 1, step)]
                expected = {n: (both[0][n] + both[1][n]) / every for n in both[0]}
                assert_close(model, expected, step)
        session.detach()

    run_on_lasting_groups(SITES, body)


TOLD = {name: NETS[name] for name in ("Workspace", "Branch", "ZeroedOutput", "Frees", "Overwrites")}


@pytest.mark.parametrize(("by", "net"), covering(FACTORS, TOLD, quick=2, every=2))
def test_what_begins_later_is_refused_by_all_sites_once(by, net):
    """On one site, in the fourth step: later ones are right again."""

    def body(rank: int, group: Any) -> str:
        model, told = made(net), ""
        session = og.distribute(model, by, group=group)
        for step in range(6):
            model.meddles = lambda step=step: rank == 1 and step >= 3
            model.zero_grad()
            try:
                model(batch(rank, step)).square().mean().backward()
            except og.StepDiscardedError as error:
                assert step == 3
                assert all(p.grad is None for p in model.parameters())
                told = str(error)
            else:
                assert (step == 3) <= (not told)
                if net is not Branch or step < 3:
                    assert_close(model, plain_of(net, step), step)
        session.detach()
        return told

    def plain_of(net: Any, step: int) -> dict[str, Tensor]:
        return plain(net, step) if step < 3 else mixed(net, step)

    def mixed(net: Any, step: int) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for rank in range(SITES):
            model = made(net)
            model.meddles = lambda rank=rank: rank == 1
            model(batch(rank, step)).square().mean().backward()
            for name, p in model.named_parameters():
                total[name] = total.get(name, 0) + p.grad.double() / SITES
        return total

    first, second = run_on_lasting_groups(SITES, body)
    assert first == second
    assert first.endswith("pass og.Dense() for this parameter")
    assert "on site 1 were written to or freed after the layer's own backward" in first
    assert first.split("'")[1] in {"first.weight", "second.weight", "last.weight"}


def test_what_is_large_beside_its_weight_is_copied_from_when_somebody_wrote_to_it(monkeypatch):
    monkeypatch.setattr(kept, "_FEW", 0)

    def body(rank: int, group: Any) -> list[str]:
        model, told = made(Wide), []
        session = og.distribute(model, og.RankDAD(rank=30), group=group)
        for step in range(4):
            model.zero_grad()
            draw = torch.Generator().manual_seed(rank)
            try:
                model(torch.randn(200, WIDTH, generator=draw)).square().mean().backward()
            except og.StepDiscardedError as error:
                told.append(f"{step}: {error}")
        session.detach()
        return told

    first, second = run_on_lasting_groups(SITES, body)
    assert first == second
    assert [line[:2] for line in first] in (["0:"], ["0:", "1:"], ["1:"])


class Wide(Frees):
    """The same; its batches have more rows than its weights."""


@pytest.mark.parametrize("by", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("net", [Workspace, Frees])
def test_passes_that_are_not_shared_keep_what_their_backward_had(by, net):
    def body(rank: int, group: Any) -> None:
        model = made(net)
        session = og.distribute(model, by, group=group)
        for step in range(3):
            model.zero_grad()
            for part in range(2):
                with session.no_sync() if part == 0 else nullcontext():
                    model(batch(rank, 2 * step + part)).square().mean().backward()
            both = [plain(net, 2 * step + part) for part in range(2)]
            assert_close(model, {n: both[0][n] + both[1][n] for n in both[0]}, step)
        session.detach()

    run_on_lasting_groups(SITES, body)


def test_nan_is_no_change():
    keeper = kept.Keeper("w", 4, kept.Alarm())
    t = torch.tensor([1.0, float("nan")])
    found = keeper.keep([t])()
    assert found[0] is t
    assert not keeper.copies
