"""Helpers for low-rank methods: a small model, batches whose gradients have a spectrum, errors."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

import outergrad as og
from ranks import run_on_lasting_groups


def decaying(rows: int, inputs: int, seed: int) -> Tensor:
    """Rows whose singular values fall, as those of real activations."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inputs, generator=generator) * torch.arange(1, inputs + 1) ** -0.8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 80), nn.LayerNorm(80), nn.Tanh(), nn.Linear(80, 60))


def backward(replica: nn.Module, x: Tensor) -> dict[str, Tensor]:
    replica.zero_grad()
    replica(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in replica.named_parameters() if p.grad is not None}


def mean_gradients(original: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """Mean over sites, in float64."""
    replica = copy.deepcopy(original).double()
    sites = [backward(replica, x.double()) for x in batches]
    return {name: sum(g[name] for g in sites) / len(sites) for name in sites[0]}


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def train(method: Any, sites: int, steps: int, rows=lambda rank, step: 40):
    """Per site, the gradients of every step on new batches, and the bytes of the last."""
    original = model()

    def body(rank, group):
        replica = copy.deepcopy(original)
        session = og.distribute(replica, method, group=group)
        found = [backward(replica, batch(rank, step, rows(rank, step))) for step in range(steps)]
        return found, session.stats().sent_bytes

    return run_on_lasting_groups(sites, body)


def batch(rank: int, step: int, rows: int) -> Tensor:
    return decaying(rows, 100, seed=100 * step + rank)


def expected(sites: int, step: int, rows=lambda rank, step: 40) -> dict[str, Tensor]:
    return mean_gradients(model(), [batch(r, step, rows(r, step)) for r in range(sites)])


def total(gradients: list[dict[str, Tensor]], name: str) -> Tensor:
    return sum((step[name].double() for step in gradients), torch.zeros(()).double())


def gradients_around_a_void_step(
    method: Any, sites: int, *, void: bool
) -> list[list[dict[str, Tensor]]]:
    """Gradients of four steps per site; with `void`, rank 1 raises in a further one between."""
    original = model()

    def body(rank, group):
        replica = copy.deepcopy(original)
        og.distribute(replica, method, group=group)
        found = []
        for step in range(4):
            if void and step == 2:
                with suppress(og.StepDiscardedError, ZeroDivisionError):
                    broken_backward(replica, batch(rank, 9, 40), broken=rank == 1)
                replica.zero_grad()
            found.append(backward(replica, batch(rank, step, 40)))
        return found

    return run_on_lasting_groups(sites, body)


def broken_backward(replica: nn.Module, x: Tensor, *, broken: bool) -> None:
    hidden = replica[0](x)
    if broken:
        hidden.register_hook(raise_in_backward)
    replica[3](replica[2](replica[1](hidden))).square().mean().backward()


def raise_in_backward(_gradient: Tensor) -> None:
    raise ZeroDivisionError
