"""Selective activation checkpoints, which keep what some operators return, and scripted modules."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import outergrad as og
from cases import relative_error
from covering import covering
from ranks import run_on_lasting_groups

SITES, STEPS = 2, 3
METHODS: dict[str, Any] = {
    "default": None,
    "dense": og.Dense(),
    "dad": og.DAD(always=True),
    "dad, raw rows": og.DAD(always=True, reveal="activations"),
    "gather": og.RankDAD(rank=1000),
    "two_way": og.RankDAD(rank=1000, reduce="two_way"),
    "all_reduce": og.RankDAD(rank=1000, reduce="all_reduce"),
    "sparse": og.Sparse(density=1.0, always=True),
    "edad": og.EDAD(always=True, inputs="raw"),
    "per layer": og.PerLayer({"0.*": og.Dense(), "*": og.DAD(always=True)}),
}
_ATEN = torch.ops.aten
KEPT = {
    "products": [_ATEN.mm.default, _ATEN.addmm.default, _ATEN.convolution.default],
    "everything of linear layers": [_ATEN.addmm.default, _ATEN.view.default, _ATEN.clone.default],
    "nothing": [],
}


def _built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 3, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 10),
        nn.Tanh(),
        nn.Linear(10, 10, bias=False),
        nn.Linear(10, 3),
    ).double()


NET = _built()


def _batch(site: int) -> Tensor:
    generator = torch.Generator().manual_seed(site)
    return torch.randn(4 + site, 2, 6, generator=generator, dtype=torch.float64)


def _pooled(built: Callable[[int], nn.Module]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for site in range(SITES):
        m = built(site)
        (m(_batch(site)).square().mean() / SITES).backward()
        for name, p in m.named_parameters():
            assert p.grad is not None
            found[name] = found.get(name, 0) + p.grad
    return found


def _check(
    method: Any, built: Callable[[int], nn.Module], forward: Callable[[nn.Module, Tensor], Tensor]
) -> list[dict[str, str]]:
    """All gradients are the pooled ones in every step; returns how the weights travelled."""
    models, expected = [built(site) for site in range(SITES)], _pooled(built)

    def body(site, group):
        m, found = models[site], []
        session = og.distribute(m, method, group=group)
        for _ in range(STEPS):
            m.zero_grad()
            forward(m, _batch(site)).square().mean().backward()
            found.append({name: p.grad.clone() for name, p in m.named_parameters()})
        travels = {line.parameter: line.travels for line in session.coverage()}
        session.detach()
        return found, travels

    sites = run_on_lasting_groups(SITES, body)
    for found, _ in sites:
        for gradients in found:
            for name, gradient in expected.items():
                assert relative_error(gradients[name], gradient) < 1e-10, name
    return [travels for _, travels in sites]


@pytest.mark.parametrize(("kept", "method"), covering(list(KEPT), list(METHODS), quick=4, every=2))
def test_gradients_under_selective_checkpoints(kept, method):
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        context_fn = partial(create_selective_checkpoint_contexts, KEPT[kept])
        return checkpoint(m[2:], m[:2](x), use_reentrant=False, context_fn=context_fn)

    def whole(m: nn.Module, x: Tensor) -> Tensor:
        context_fn = partial(create_selective_checkpoint_contexts, KEPT[kept])
        return checkpoint(m, x, use_reentrant=False, context_fn=context_fn)

    for way in (forward, whole):
        for travels in _check(METHODS[method], lambda site: copy.deepcopy(NET), way):
            if method == "dad":
                assert travels["3.weight"] == travels["6.weight"] == "factors"


# -- modules of TorchScript -----------------------------------------------------------------------


def _loaded(m: Any) -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(m, file)
    file.seek(0)
    return torch.jit.load(file)


def _with(make: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    def built(site: int) -> nn.Module:
        m = _built()
        m[4] = make()
        return m

    return built


def _norm() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Tanh(), nn.BatchNorm1d(10), nn.Linear(10, 10)).double()


_ROWS = torch.ones(3, 10, dtype=torch.float64)
SCRIPTED: dict[str, Callable[[int], nn.Module]] = {
    "a scripted ReLU": _with(lambda: torch.jit.script(nn.ReLU())),
    "scripted layers": _with(lambda: torch.jit.script(_norm())),
    "traced layers": _with(lambda: torch.jit.trace(_norm(), _ROWS, check_trace=False)),
    "loaded layers": _with(lambda: _loaded(torch.jit.script(_norm()))),
    "the whole model": lambda site: torch.jit.script(_built()),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    ("kind", "method"), covering(list(SCRIPTED), list(METHODS), quick=4, every=2)
)
def test_scripted_modules(kind, method):
    for travels in _check(METHODS[method], SCRIPTED[kind], lambda m, x: m(x)):
        if method == "dad" and kind != "the whole model":
            assert travels["3.weight"] == travels["6.weight"] == "factors"


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_statistics_of_scripted_norms_are_shared():
    models = [SCRIPTED["scripted layers"](site) for site in range(SITES)]

    def body(site, group):
        session = og.distribute(models[site], og.DAD(always=True), group=group)
        for _ in range(STEPS):
            models[site](_batch(site)).square().mean().backward()
        session.detach()
        return {name: t.clone() for name, t in models[site].named_buffers()}

    first, second = run_on_lasting_groups(SITES, body)
    assert set(first) == {
        f"4.1.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert all(torch.equal(t, second[name]) for name, t in first.items())
    assert first["4.1.num_batches_tracked"] == STEPS
