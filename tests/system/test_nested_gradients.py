"""Custom functions that return gradients of their own parameters, which they differentiate by."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outergrad as og
from cases import Branches, Case, mlp, rows, run, sequences
from covering import covering
from every_method import assert_exact
from ranks import run_on_lasting_groups


def params_of(*modules: nn.Module) -> list[nn.Parameter]:
    return [p for module in modules for p in module.parameters() if p.requires_grad]


def products(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], deltas: Sequence[Tensor]
) -> list[Tensor]:
    """Vector-Jacobian products; zeros where an input has no part."""
    return list(torch.autograd.grad(outputs, inputs, deltas, materialize_grads=True))


class Recomputed(torch.autograd.Function):
    """Keeps the input alone, and computes again in backward; x is what a module takes."""

    @staticmethod
    def forward(ctx, module, x, *params):
        ctx.module, ctx.params = module, params
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, delta):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach()
            x = x.requires_grad_() if x.is_floating_point() else x
            y = ctx.module(x)
        if not x.is_floating_point():
            return None, None, *products([y], ctx.params, [delta])
        return None, *products([y], [x, *ctx.params], [delta])


class Reversible(torch.autograd.Function):
    """`y1 = x1 + f(x2)`, `y2 = x2 + g(y1)`; the inputs follow from the outputs."""

    @staticmethod
    def forward(ctx, f, g, x1, x2, *params):
        y1 = x1 + f(x2)
        y2 = x2 + g(y1)
        ctx.f, ctx.g, ctx.params = f, g, params
        ctx.save_for_backward(y1, y2)
        return y1, y2

    @staticmethod
    def backward(ctx, d1, d2):
        f, g = ctx.f, ctx.g
        y1, y2 = (t.detach() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y1.requires_grad_()
            change = g(y1)
        of_g = params_of(g)
        d_y1, *of_g = products([change], [y1, *of_g], [d2])
        d1, x2 = d1 + d_y1, (y2 - change).detach()
        with torch.enable_grad():
            x2.requires_grad_()
            change = f(x2)
        d_x2, *of_f = products([change], [x2, *params_of(f)], [d1])
        return None, None, d1, d2 + d_x2, *of_f, *of_g


class Adjoint(torch.autograd.Function):
    """Midpoint steps of `dy/dt = f(y)` and, in backward, of the adjoint equations."""

    STEPS, H = 4, 0.25

    @staticmethod
    def forward(ctx, f, y, *params):
        ctx.f, ctx.params, path = f, params, [y]
        for _ in range(Adjoint.STEPS):
            path.append(Adjoint.step(f, path[-1]))
        ctx.save_for_backward(*path[:-1])
        return path[-1]

    @staticmethod
    def step(f, y):
        return y + Adjoint.H * f(y + Adjoint.H / 2 * f(y))

    @staticmethod
    def backward(ctx, d):
        totals = [torch.zeros_like(p) for p in ctx.params]
        for y in reversed(ctx.saved_tensors):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                after = Adjoint.step(ctx.f, y)
            d, *found = products([after], [y, *ctx.params], [d])
            totals = [total + g for total, g in zip(totals, found, strict=True)]
        return None, d, *totals


class Implicit(torch.autograd.Function):
    """A fixed point `z = f(z, x)`; the graph of one more step is made in forward."""

    @staticmethod
    def forward(ctx, f, x, *params):
        z = fixed_point(lambda z: f(z, x), torch.zeros_like(x))
        with torch.enable_grad():
            ctx.z, ctx.x = z.detach().requires_grad_(), x.detach().requires_grad_()
            ctx.again = f(ctx.z, ctx.x)
        ctx.params = params
        return z.clone()

    @staticmethod
    def backward(ctx, d):
        def step(u):
            return torch.autograd.grad(ctx.again, ctx.z, u, retain_graph=True)[0] + d

        d = fixed_point(step, d)
        return None, *products([ctx.again], [ctx.x, *ctx.params], [d])


def fixed_point(step: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    for _ in range(60):
        z = step(z)
    return z


def contraction(m: Branches, z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(0.3 * m.inner(z) + m.outer(x))


def by_hook(m: Branches, x: Tensor) -> Tensor:
    """A deep equilibrium model: a hook of the fixed point solves for its delta."""
    with torch.no_grad():
        z = fixed_point(lambda z: contraction(m, z, x), torch.zeros_like(x))
    z = contraction(m, z, x)
    z_0 = z.detach().requires_grad_()
    again = contraction(m, z_0, x)
    if z.requires_grad:
        step = lambda u: torch.autograd.grad(again, z_0, u, retain_graph=True)[0]  # noqa: E731
        z.register_hook(lambda d: fixed_point(lambda u: step(u) + d, d))
    return m.head(z)


def reversible(m: Branches, x: Tensor) -> Tensor:
    x1, x2 = m.first(x).chunk(2, dim=1)
    for k in range(2):
        f, g = m.fs[k], m.gs[k]
        x1, x2 = Reversible.apply(f, g, x1, x2, *params_of(f, g))
    return m.head(torch.cat([x1, x2], dim=1))


def halves() -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 4)) for _ in "12")


def equilibrium(forward: Callable[..., Tensor]) -> Case:
    layers = {"inner": nn.Linear(6, 6), "outer": nn.Linear(6, 6), "head": nn.Linear(6, 3)}
    return Case(Branches(forward, **layers), rows(6))


def inside(layer: nn.Module, inputs: Any = None, *, twice: bool = False) -> Case:
    """In a function that computes again; `twice`, directly before that, too."""

    def forward(self: Branches, x: Tensor) -> Tensor:
        ys = [self.layer(x)] if twice else []
        ys.append(Recomputed.apply(self.layer, x, *params_of(self.layer)))
        return torch.cat([y.flatten() for y in ys])

    return Case(Branches(forward, layer=layer), rows(6) if inputs is None else inputs)


class First(nn.Module):
    """The first of what a module returns; self-attention if it takes three inputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        attends = isinstance(self.module, nn.MultiheadAttention)
        return (self.module(x, x, x) if attends else self.module(x))[0]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


LAYERS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "linear": lambda: (mlp(6, 9, 5),),
    "convolution": lambda: (nn.Conv2d(4, 6, 3, groups=2), rows(4, 6, 6)),
    "embedding": lambda: (nn.Embedding(20, 5, padding_idx=0), sequences()),
    "norm": lambda: (nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)),),
    "attention": lambda: (First(nn.MultiheadAttention(6, 2, batch_first=True)), rows(3, 6)),
    "gru cell": lambda: (nn.GRUCell(6, 5),),
    "lstm": lambda: (First(nn.LSTM(6, 5)), rows(3, 6)),
    "checkpointed": lambda: (Checkpointed(),),
}

CASES: dict[str, Callable[[], Case]] = {
    "reversible": lambda: Case(
        Branches(reversible, first=nn.Linear(6, 8), fs=halves(), gs=halves(), head=nn.Linear(8, 3)),
        rows(6),
    ),
    "adjoint": lambda: Case(
        Branches(
            lambda m, x: m.head(Adjoint.apply(m.f, m.first(x), *params_of(m.f))),
            **{"first": nn.Linear(6, 4), "f": halves()[0], "head": nn.Linear(4, 3)},
        ),
        rows(6),
    ),
    "equilibrium by a hook": lambda: equilibrium(by_hook),
    "equilibrium by a function": lambda: equilibrium(
        lambda m, x: m.head(
            Implicit.apply(
                lambda z, x: contraction(m, z, x), m.outer(x), *params_of(m.inner, m.outer)
            )
        )
    ),
    **{name: lambda made=made: inside(*made()) for name, made in LAYERS.items()},
    **{
        f"{name}, and directly": lambda made=made: inside(*made(), twice=True)
        for name, made in LAYERS.items()
    },
}


@pytest.mark.parametrize(("name", "sites"), covering(CASES.keys(), [1, 2], quick=4, every=2))
def test_functions_may_differentiate_their_own_parameters(name, sites):
    assert_exact(CASES[name](), sites, list(CASES).index(name))


def test_what_a_function_differentiates_travels_dense_and_without_headers_in_the_end():
    case = CASES["reversible"]()

    def body(rank, group):
        model, sent = copy.deepcopy(case.model), []
        session = og.distribute(model, og.DAD(always=True), group=group)
        for _ in range(6):
            model.zero_grad()
            run(model, case, case.batches[rank]).backward()
            sent.append(session.stats().sent_bytes)
        ways = {line.parameter: line.travels for line in session.coverage()}
        session.detach()
        return ways, sent

    for ways, sent in run_on_lasting_groups(2, body):
        assert {name for name, way in ways.items() if way == "factors"} == {
            *("first.weight", "first.bias", "head.weight", "head.bias")
        }
        assert sent[-1] == sent[-2] < sent[2] < sent[0]
