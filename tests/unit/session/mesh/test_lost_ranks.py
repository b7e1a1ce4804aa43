"""A rank of a mesh dies somewhere in a step: all others name it, and know how far they are."""

from __future__ import annotations

import copy
import random
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import outergrad as og
from cases import mlp
from covering import covering
from meshes import ThreadMesh, try_mesh
from outergrad.comm.torch import TorchComm
from outergrad.session.mesh import ranks as mesh_ranks

SITES, LOCAL, STEP = 2, 2, 2
PLACES = [(site, local) for site in range(SITES) for local in range(LOCAL)]
METHODS = {
    "dense": og.Dense(),
    "dad": og.DAD(always=True),
    "rank-dad": og.RankDAD(rank=2, reduce="gather"),
    "powersgd": og.PowerSGD(rank=2, min_ratio=1),
    "local steps": og.LocalSteps(1, method=og.Dense()),
    "local steps, inside": og.LocalSteps(2, method=og.Dense()),
}
X = torch.randn(SITES * LOCAL, 4, 6, generator=torch.Generator().manual_seed(0))
torch.manual_seed(3)
MODEL = mlp(6, 16, 16, 5)
own = threading.local()


class DiedError(BaseException):  # nobody takes it for an error of the step
    """What a rank raises that is no more."""


@pytest.fixture
def dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks die in the exchange that is told to them, before it or when it has begun."""
    for name in ("_exchanged", "all_reduce"):
        monkeypatch.setattr(TorchComm, name, dying(getattr(TorchComm, name)))


def dying(exchange: Any) -> Any:
    def exchanged(comm: TorchComm, *args: Any) -> Any:
        left = getattr(own, "left", None)
        if left is None:
            return exchange(comm, *args)
        own.left = left - 1
        work = exchange(comm, *args) if left or own.sends else None
        if left:
            return work
        own.left = 0
        for one in own.comms:
            one.close()
        raise DiedError

    return exchanged


def train(mesh: ThreadMesh, method: Any, victim: int, at: int, *, sends: bool) -> Any:
    """The step that is not made any more, or what was raised, and the weights of before."""
    own.left = None
    model = copy.deepcopy(MODEL)
    session = og.distribute(model, method, mesh=mesh, timeout=2.0)
    own.comms, own.sends = (session._ranks._levels.site, session._ranks._levels.local), sends
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEP + 6):
        if step == STEP and mesh.number == victim:
            own.left = at
        optimizer.zero_grad()
        try:
            (model(X[mesh.number] + step) ** 2).mean().backward()
            optimizer.step()
        except og.SiteLostError as error:
            return error, [p.detach().clone() for p in model.parameters()]
    return None


def check(found: list[Any], victim: int) -> None:
    """Every rank that is left names the one that is not, and who differs says so."""
    left = {n: one for n, one in enumerate(found) if n != victim}
    site, local = PLACES[victim]
    for n, one in left.items():
        assert isinstance(one, tuple), (n, one)
        error = one[0]
        assert (error.sites, error.ranks) == ((site,), ((site, local),)), (n, error)
        assert str(error).startswith(f"local rank {PLACES[n][1]} of site {PLACES[n][0]} "), error
        assert f"lost local rank {local} of site {site} in step" in str(error)
        assert "live" not in str(error)
        assert (error.again().ranks, error.again().sites) == (error.ranks, error.sites)


def check_steps(found: list[Any], victim: int) -> None:
    """Ranks that are at the same step are equal to the bit; of others both say that they differ."""
    left = {n: one for n, one in enumerate(found) if n != victim}
    for n, (error, weights) in left.items():
        for k, (other, others) in left.items():
            if error.step == other.step:
                assert same(weights, others), (n, k)
                continue
            assert abs(error.step - other.step) == 1
            assert not error.certain, (error, other)
            assert PLACES[k][0] in error.may_differ, (error, other)


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize("seed", covering(range(24), quick=5))
def test_a_rank_that_dies_is_named_by_all_others(dies: None, seed: int) -> None:
    draw = random.Random(seed)
    name = list(METHODS)[seed % len(METHODS)]
    victim, at, sends = draw.randrange(SITES * LOCAL), draw.randrange(9), draw.random() < 0.5

    def body(mesh: ThreadMesh) -> Any:
        return train(mesh, METHODS[name], victim, at, sends=sends)

    found = try_mesh(SITES, LOCAL, body, timeout=timedelta(seconds=20))
    assert isinstance(found[victim], DiedError), found[victim]
    check(found, victim)
    if not name.startswith("local steps"):  # between two exchanges each site steps by itself
        check_steps(found, victim)


def test_ranks_without_a_common_store_do_not_claim_that_others_live(
    dies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_ranks, "_root_of", lambda store: dist.HashStore())

    def body(mesh: ThreadMesh) -> Any:
        return train(mesh, og.DAD(), 1, 3, sends=False)

    found = try_mesh(SITES, LOCAL, body, timeout=timedelta(seconds=20))
    for n in (0, 2, 3):
        error = found[n][0]
        assert n == 2 or error.ranks == ((0, 1),)  # whose neighbour alone has met the dead one
        assert "live" not in str(error)
        assert error.may_differ == (0, 1)
        assert "the ranks share no store" in str(error)
