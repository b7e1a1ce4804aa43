"""What every policy must do, whoever wrote it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from examples.settling import Settling
from torch import Tensor, nn

import outergrad as og
from cases import mlp, relative_error
from outergrad.linalg.outer import formed
from ranks import run_on_lasting_groups

START = mlp(40, 50, 30)
ROWS = torch.randn(3, 12, 40, generator=torch.Generator().manual_seed(4))
POLICIES: dict[str, Any] = {
    "per layer": og.PerLayer({"0.*": og.RankDAD(rank=1), "*": og.DAD()}),
    "schedule": og.Schedule({0: og.Sparse(density=0.1), 3: og.RankDAD(rank=2), 6: og.DAD()}),
    "parts change": og.Schedule(
        {
            0: og.PerLayer({"0.*": og.RankDAD(rank=1), "*": og.Sparse(density=0.1)}),
            4: og.PerLayer({"0.*": og.Sparse(density=0.1), "*": og.RankDAD(rank=1)}),
        }
    ),
    "settling": Settling(dense=2, stage=2, ranks=(4, 2, 1)),
}
STEPS = 10


@pytest.mark.parametrize("name", POLICIES)
def test_the_method_of_every_step_is_a_candidate(name):
    policy = POLICIES[name]
    for parameter, _ in START.named_parameters():
        candidates = policy.candidates(parameter)
        assert all(policy.method_of(parameter, step) in candidates for step in range(STEPS))
        assert candidates == copy.deepcopy(policy).candidates(parameter)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) ** 2).mean()


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("name", POLICIES)
def test_what_was_applied_and_what_is_owed_is_all_there_was(name, sites):
    def body(rank: int, group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = copy.deepcopy(START)
        session = og.distribute(model, POLICIES[name], group=group)
        applied = {n: torch.zeros_like(p.double()) for n, p in model.named_parameters()}
        for step in range(STEPS):
            model.zero_grad()
            loss_of(model, (1 + step) * ROWS[rank]).backward()
            for n, p in model.named_parameters():
                applied[n] += p.grad
        owed = {n: torch.zeros_like(t) for n, t in applied.items()}
        for compressor, units in session._exchange.compressors.items():
            for matrix in (m for unit in units for m in unit.matrices):
                if (residual := compressor.residual(matrix)) is not None:
                    owed[matrix.weight] += formed(residual).view_as(owed[matrix.weight])
        session.detach()
        return applied, owed

    found = run_on_lasting_groups(sites, body)
    double = copy.deepcopy(START).double()
    for step in range(STEPS):
        for x in ROWS[:sites].double():
            loss_of(double, (1 + step) * x).backward()
    for n, p in double.named_parameters():
        assert all(torch.equal(applied[n], found[0][0][n]) for applied, _ in found), n
        whole = sites * found[0][0][n] + sum(owed[n] for _, owed in found)
        assert relative_error(whole, p.grad) < 1e-6, n


def test_the_ranks_of_the_example_fall():
    """By what is sent: dense, then ever less."""

    def body(rank: int, group: Any) -> list[int]:
        model = mlp(200, 200)
        session = og.distribute(model, POLICIES["settling"], group=group)
        sent = []
        for _ in range(STEPS):
            model.zero_grad()
            loss_of(model, torch.randn(64, 200)).backward()
            sent.append(session.stats().sent_bytes)
        session.detach()
        return sent

    sent = run_on_lasting_groups(2, body)[0]
    assert sent[1] > 5 * sent[3] > 5 * sent[5] > 5 * sent[9], sent
