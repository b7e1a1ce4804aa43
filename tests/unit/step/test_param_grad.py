"""Gradients lie in memory as autograd's do, whoever makes them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outergrad as og
from covering import covering
from loops import METHODS
from outergrad.step import param_grad
from ranks import run_on_lasting_groups

SITES = 2

pytestmark = pytest.mark.usefixtures("large_matrices")

LAYOUTS: dict[str, Any] = {
    "contiguous": lambda: torch.zeros(4, 3, 2, 2),
    "channels_last": lambda: torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "channels_last, 1 x 1": lambda: torch.zeros(4, 3, 1, 1).to(memory_format=torch.channels_last),
    "channels_last, one channel": lambda: torch.zeros(4, 1, 2, 2).to(
        memory_format=torch.channels_last
    ),
    "channels_last_3d": lambda: torch.zeros(4, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: torch.zeros(5, 3).t(),
    "permuted": lambda: torch.zeros(5, 3, 4).permute(1, 2, 0),
    "part of columns": lambda: torch.zeros(5, 7)[:, :3],
    "part of columns, transposed": lambda: torch.zeros(5, 7)[:, :3].t(),
    "expanded": lambda: torch.zeros(5, 1).expand(5, 3),
    "one number": lambda: torch.tensor(1.0),
    "empty": lambda: torch.zeros(0, 3).t(),
}


@pytest.mark.parametrize("given", ["contiguous", "reversed", "expanded"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("write", [param_grad.add, param_grad.overwrite, param_grad.replace])
def test_a_gradient_has_the_strides_that_autograd_gives(write, layout, given):
    mine, autograds = (nn.Parameter(LAYOUTS[layout]()) for _ in range(2))
    shape = mine.shape
    value = torch.arange(float(mine.numel())).reshape(shape)
    if given == "reversed":
        axes = tuple(reversed(range(len(shape))))
        value = value.permute(axes).contiguous().permute(axes)
    if given == "expanded":
        value = torch.ones(()).expand(shape)

    write({"w": mine}, {"w": value})

    (autograds * value).sum().backward()
    assert mine.grad is not None
    assert autograds.grad is not None
    assert torch.equal(mine.grad, value)
    sizes_above_one = [k for k, size in enumerate(shape) if size > 1]
    for k in sizes_above_one if mine.numel() else ():
        assert mine.grad.stride(k) == autograds.grad.stride(k)


class Mixed(nn.Module):
    """Convolutions whose weights are channels_last, and linear layers with transposed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3)
        self.first = nn.Linear(16 * 4 * 4, 32)
        self.last = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.ones(32, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).relu().flatten(1)
        h = self.last(self.first(h).tanh())
        return h * self.scale.sum(1)


def mixed() -> Mixed:
    model = copy.deepcopy(_MIXED)
    model.conv.weight.data = model.conv.weight.data.to(memory_format=torch.channels_last)
    for layer in (model.first, model.last):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    model.scale = nn.Parameter(model.scale.detach().t().contiguous().t())
    return model


torch.manual_seed(0)
_MIXED = Mixed()
F.conv2d(torch.ones(1, 8, 6, 6), _MIXED.conv.weight)

BY = {name: method for name, method in METHODS.items() if name != "edad"} | {
    "edad": og.EDAD(blocks=["first", "last"], always=True),
    "auto": og.Auto(),
    "dad, where it pays": og.DAD(),
    "every other": og.DAD(always=True, every=2),
    "rank 2": og.RankDAD(rank=2),
    "rank 2, dense memory": og.RankDAD(rank=2, error_feedback="dense"),
    "sparse, tenth": og.Sparse(density=0.1, always=True),
    "local steps": og.LocalSteps(1),
}
LOOPS = ["as usual", "no_sync first", "keeps gradients", "clones of a transform"]
FUSED: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
}


@dataclass(frozen=True)
class Forms:
    """Forms what it is given, and changes nothing."""

    needs_samples = needs_all_layers = False
    forms = True

    def __call__(self, gradient: og.transforms.SiteGradient) -> og.transforms.SiteGradient:
        return og.transforms.formed(gradient)


@pytest.mark.parametrize(("by", "loop", "make"), covering(BY, LOOPS, FUSED, quick=8, every=4))
def test_fused_optimizers_apply_the_gradient_of_every_method(by, loop, make):
    """Its twin has contiguous weights and gradients, and an optimizer that goes by elements."""

    def body(rank: int, group: Any) -> list[list[Any]]:
        model = mixed()
        optimizer = make(model.parameters())
        twin = copy.deepcopy(_MIXED)
        pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
        for p, q in pairs:
            q.data = p.detach().clone(memory_format=torch.contiguous_format)
        theirs = make(twin.parameters())
        options: dict[str, Any] = {}
        if loop.startswith("clones") and not isinstance(by, (og.LocalSteps, og.EDAD)):
            options["transform"] = Forms()
        session = og.distribute(model, by, group=group, **options)
        found = []
        for step in range(4):
            optimizer.zero_grad(set_to_none=loop != "keeps gradients" or step == 0)
            theirs.zero_grad()
            draw = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(2, 8, 6, 6, generator=draw)
            if loop == "no_sync first" and not isinstance(by, og.LocalSteps):
                with session.no_sync():
                    model(x).square().mean().backward()
            model(x).square().mean().backward()
            for p, q in pairs:
                if p.grad is not None:
                    q.grad = p.grad.clone(memory_format=torch.contiguous_format)
                found.append(p.grad is None or p.grad.stride() == p.stride())
            if isinstance(by, og.LocalSteps):
                optimizer.step()
                for p, q in pairs:
                    q.data.copy_(p.data)
                continue
            optimizer.step()
            theirs.step()
            error = max((p - q).detach().abs().max().item() for p, q in pairs)
            assert error < 1e-6, (step, error)
        session.detach()
        return found

    for one in run_on_lasting_groups(SITES, body):
        assert all(one)


def test_an_outer_optimizer_of_local_steps_may_be_fused():
    """The change since the last exchange is a gradient, too."""

    def train(fused: bool) -> list[Tensor]:
        outer = lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, fused=fused)  # noqa: E731

        def body(rank: int, group: Any) -> list[Tensor]:
            model = mixed()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            og.distribute(model, og.LocalSteps(1, outer=outer), group=group)
            for step in range(3):
                optimizer.zero_grad()
                draw = torch.Generator().manual_seed(10 * step + rank)
                model(torch.randn(2, 8, 6, 6, generator=draw)).square().mean().backward()
                optimizer.step()
            return [p.detach().clone() for p in model.parameters()]

        return run_on_lasting_groups(SITES, body)[0]

    for p, q in zip(train(True), train(False), strict=True):
        assert torch.allclose(p, q, atol=1e-6)
