"""A script that saves with torch.save: what goes on to the bit, alone and with the session."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import nn

import outergrad as og
from ranks import run_on_lasting_groups

OWES_NOTHING = [og.Dense(), og.DAD(), og.DAD(always=True), og.EDAD()]
REMEMBERS = [
    og.RankDAD(rank=1),
    og.RankDAD(rank=1, reduce="all_reduce"),
    og.PowerSGD(rank=1),
    og.Sparse(density=0.1),
    og.LocalSteps(2),
    og.DAD(always=True, every=2),
]
STEPS, STOP = 8, 3


def trained(rank, group, method, keeps) -> list[torch.Tensor]:
    """Weights after all steps, interrupted and gone on from a script's save, or not (None)."""
    model, optimizer, session = fresh(method, group)
    for step in range(STEPS):
        if step == STOP and keeps is not None:
            kept = deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            kept["session"] = deepcopy(session.state_dict())
            session.release()
            model, optimizer, session = fresh(method, group)
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
            if "session" in keeps:
                session.load_state_dict(kept["session"])
        batch = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 12, generator=batch)).square().mean().backward()
        optimizer.step()
    session.flush()
    session.detach()
    return [p.detach().clone() for p in model.parameters()]


def fresh(method, group):
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-0.3, 0.3, p.numel()).view_as(p))
    session = og.distribute(model, method, group=group)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), session


def weights(method, keeps):
    return run_on_lasting_groups(2, lambda rank, group: trained(rank, group, method, keeps))[0]


def equal(ours, theirs) -> bool:
    return all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("method", OWES_NOTHING, ids=repr)
def test_where_nothing_is_owed_the_scripts_own_save_is_enough(method):
    assert equal(weights(method, None), weights(method, {"model"}))


@pytest.mark.parametrize("method", REMEMBERS, ids=repr)
def test_what_a_method_remembers_is_in_the_sessions_state_alone(method):
    """Where gradients are owed a script that loads without it is told so, too."""
    through = weights(method, None)
    owes = not isinstance(method, (og.LocalSteps, og.DAD))
    told = pytest.warns(UserWarning, match="weights were loaded") if owes else nullcontext()
    with told:
        assert not equal(through, weights(method, {"model"}))
    assert equal(through, weights(method, {"model", "session"}))
