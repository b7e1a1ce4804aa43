"""Layers of which nothing follows from their rows: they rest, and gradients stay right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outergrad as og
from cases import mlp, relative_error
from outergrad.methods.auto.chooser import AutoChooser
from ranks import run_on_lasting_groups

START = mlp(30, 40, 20, 5)
STEPS = 36


def arms(self: AutoChooser, step: int) -> tuple[int, ...]:
    """Dense, then by factors for a while, twice."""
    return (int(step % 18 in range(12, 16)),) * len(self._groups)


@pytest.fixture(autouse=True)
def turns(monkeypatch):
    monkeypatch.setattr(AutoChooser, "_arm", arms)
    monkeypatch.setattr(AutoChooser, "hears", lambda self, step: False)


def batch(rank: int, step: int) -> Tensor:
    """Other rows now and then, also while layers rest."""
    rows = 3 + rank + step // 5 % 3
    return torch.randn(rows, 30, generator=torch.Generator().manual_seed(10 * step + rank))


def pooled(rank_steps: list[tuple[int, int]], sites: int = 2) -> dict[str, Tensor]:
    """In float64, of these batches."""
    model = copy.deepcopy(START).double()
    for rank, step in rank_steps:
        ((model(batch(rank, step).double()) ** 2).mean() / sites).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check(model: nn.Module, expected: dict[str, Tensor], where: str) -> None:
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert relative_error(p.grad, expected[name]) < 5e-6, f"{where}, {name}"


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False)


@pytest.mark.parametrize("forward", [plain, checkpointed])
def test_gradients_are_right_whoever_rests(forward):
    def body(rank, group):
        model, rested = copy.deepcopy(START), []
        session = og.distribute(model, og.Auto(), group=group)
        for k in range(STEPS):
            model.zero_grad()
            rested.append([layer.rests for layer in session._exchange.next_forward.layers])
            (forward(model, batch(rank, k)) ** 2).mean().backward()
            check(model, pooled([(0, k), (1, k)]), f"rank {rank}, step {k}")
        session.detach()
        return rested

    for rested in run_on_lasting_groups(2, body):
        assert all(rested[5])
        assert not any(any(rested[k]) for k in range(12, 16))
        assert all(rested[20])


def test_a_forward_before_the_others_backward_is_shared_right():
    """It may have been tapped, or rested, as was right for the step before."""

    def body(rank, group):
        model = copy.deepcopy(START)
        session = og.distribute(model, og.Auto(), group=group)
        ahead = checkpointed(model, batch(rank, 0))
        for k in range(STEPS):
            following = checkpointed(model, batch(rank, k + 1)) if k % 4 == 0 else None
            model.zero_grad()
            (ahead**2).mean().backward()
            check(model, pooled([(0, k), (1, k)]), f"rank {rank}, step {k}")
            ahead = checkpointed(model, batch(rank, k + 1)) if following is None else following
        session.detach()

    run_on_lasting_groups(2, body)


def test_passes_without_a_message_are_shared_right():
    def body(rank, group):
        model = copy.deepcopy(START)
        session = og.distribute(model, og.Auto(), group=group)
        for k in range(STEPS):
            model.zero_grad()
            with session.no_sync():
                (model(batch(rank, k)) ** 2).mean().backward()
            (model(batch(rank, k + 100)) ** 2).mean().backward()
            expected = pooled([(r, s) for r in range(2) for s in (k, k + 100)])
            check(model, expected, f"rank {rank}, step {k}")
        session.detach()

    run_on_lasting_groups(2, body)


def test_a_graph_that_was_tapped_before_a_layer_rested_counts():
    """Its deltas come in a later backward."""

    def body(rank, group):
        model = copy.deepcopy(START)
        session = og.distribute(model, og.Auto(), group=group)
        kept = None
        for k in range(STEPS):
            model.zero_grad()
            loss = (model(batch(rank, k)) ** 2).mean()
            if k == 14:
                kept = (model(batch(rank, 77)) ** 2).mean()
            expected = [(0, k), (1, k)]
            if k == 17:
                assert kept is not None
                loss, expected = loss + kept, [*expected, (0, 77), (1, 77)]
            loss.backward()
            check(model, pooled(expected), f"rank {rank}, step {k}")
        session.detach()

    run_on_lasting_groups(2, body)
