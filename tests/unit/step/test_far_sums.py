"""Steps of more than two sites over a link that is far: sums in two rounds, each to all."""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from cases import relative_error
from outergrad.comm import torch as over_torch
from outergrad.comm.added_up import AddedUp
from outergrad.core.transport import Comm
from ranks import run_on_lasting_groups, run_ranks

STEPS = 20
"""More than one vote is for."""
METHODS = {
    "dense": og.Dense(),
    "the default": og.Auto(),
    "sketches that lose nothing": og.RankDAD(rank=32, reduce="all_reduce"),
}


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 600), nn.ReLU(), nn.Linear(600, 600), nn.Linear(600, 3))


START = made()


@pytest.fixture(autouse=True)
def far(monkeypatch):
    """Sums of all lengths are added up."""
    monkeypatch.setattr(over_torch, "lengths", lambda cost: range(16 * cost.sites, 1 << 40))


def loss_of(model: nn.Module, site: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + site)
    x = torch.randn(5 + site, 6, generator=generator)
    return model(x.to(next(model.parameters()).dtype)).square().mean()


def pooled(model: nn.Module, sites: int, step: int) -> list[Tensor]:
    """The mean over the sites in float64."""
    model = copy.deepcopy(model).double()
    sum(loss_of(model, site, step) for site in range(sites)).div(sites).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("sites", [3, 4])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_gradients_are_the_mean_and_the_same_to_the_bit(method, sites):
    def body(rank, group):
        model = copy.deepcopy(START)
        session = og.distribute(model, method, group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        worst = 0.0
        for step in range(STEPS):
            optimizer.zero_grad()
            expected = pooled(model, sites, step)
            loss_of(model, rank, step).backward()
            pairs = zip(model.parameters(), expected, strict=True)
            worst = max(worst, *(relative_error(p.grad, e) for p, e in pairs))
            optimizer.step()
        session.flush()
        session.detach()
        return worst, torch.cat([p.detach().view(-1) for p in model.parameters()])

    found = run_on_lasting_groups(sites, body)
    for worst, end in found:
        assert worst < 2e-5
        assert end.equal(found[0][1])


@pytest.mark.parametrize("step", [2, 13])
@pytest.mark.parametrize("when", ["before the step", "between the rounds"])
def test_nobody_applies_a_step_that_a_site_leaves(when, step, monkeypatch):
    leaving, go_on = list[Comm](), AddedUp._go_on

    def leaves(sums):
        for comm in leaving if sums._rank == 2 else ():
            comm.close()
        go_on(sums)

    monkeypatch.setattr(AddedUp, "_go_on", leaves)

    def body(rank, group):
        model = copy.deepcopy(START)
        session = og.distribute(model, og.Dense(), group=group, timeout=timedelta(seconds=2))
        for k in range(step):
            model.zero_grad()
            loss_of(model, rank, k).backward()
        model.zero_grad()
        loss = loss_of(model, rank, step)
        if rank == 2:
            leaving.append(session._comm)
        if rank == 2 and when == "before the step":
            session._comm.close()
            return step
        with pytest.raises(og.SiteLostError) as caught:
            loss.backward()
        assert all(p.grad is None for p in model.parameters())
        return caught.value.step

    assert run_ranks(3, body) == [step] * 3
