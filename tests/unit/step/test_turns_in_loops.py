"""Loops of all kinds go as without turns, to the bit, while receives wait for a next step."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import outergrad as og
from covering import rest_slow
from meshes import run_mesh
from outergrad.step import transport_state
from patience import distribute_then_hurry
from ranks import run_ranks, try_ranks

MODEL = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 3))
RANK_DAD = og.RankDAD(rank=2)
SIDES_IN_TURN = og.RankDAD(rank=2, reduce="alternate")
BESIDE_ROWS = og.PerLayer({"0.*": og.DAD(always=True), "*": SIDES_IN_TURN})


class Loop:
    """A training of one site.

    Attributes:
        found: the weights after every step.
        most_ahead: receives that a step left for the next one, at most.
    """

    def __init__(self, group: dist.ProcessGroup, method: object, patience_s: float = 5.0) -> None:
        self.model, self.rank, self.found = copy.deepcopy(MODEL), group.rank(), list[Tensor]()
        self.session = distribute_then_hurry(self.model, method, group=group, patience_s=patience_s)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.most_ahead = 0

    def backward(self, k: int, rows: int = 4, *, raises: bool = False) -> None:
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(100 * k + self.rank))
        hidden = self.model[:2](x)
        if raises:  # when the step has begun
            hidden.register_hook(_raise)
        self.model[2:](hidden).square().mean().backward()

    def step(self, k: int, rows: int = 4) -> None:
        self.optimizer.zero_grad()
        self.backward(k, rows)
        self.applied()

    def applied(self) -> None:
        self.optimizer.step()
        self.found += [p.detach().clone() for p in self.model.parameters()]
        left = self.session._at.comm._posted.values()
        self.most_ahead = max(self.most_ahead, sum(map(len, left)))


class BoomError(Exception):
    """Raised in a backward."""


def _raise(_: Tensor) -> None:
    raise BoomError


def accumulates(loop: Loop) -> None:
    """Receives wait through passes that are not shared."""
    for k in range(6):
        loop.optimizer.zero_grad()
        with loop.session.no_sync():
            loop.backward(2 * k)
        loop.backward(2 * k + 1)
        loop.applied()


def plain(loop: Loop) -> None:
    for k in range(8):
        loop.step(k)


def changes(loop: Loop) -> None:
    """The messages of the steps that were foreseen have other lengths."""
    for k in range(12):
        loop.step(k, rows=4 + k // 4)


def begins_again(loop: Loop) -> None:
    """One site alone knows beforehand that step 6 is not what was foreseen."""
    for k in range(10):
        loop.step(k, rows=6 if (k, loop.rank) == (6, 1) else 4)


def raises(loop: Loop) -> None:
    """Step 5 is applied on no site."""
    for k in range(9):
        loop.optimizer.zero_grad()
        if k != 5:
            loop.step(k)
        else:
            with pytest.raises(BoomError if loop.rank == 0 else og.StepDiscardedError):
                loop.backward(k, raises=loop.rank == 0)


def asks_in_between(loop: Loop) -> None:
    """Other messages pass the receives that wait."""
    for k in range(9):
        loop.step(k)
        if k == 4:
            loop.session.flush()
            loop.session.load_state_dict(loop.session.state_dict())
        if k == 6:
            assert not loop.session.make_equal(loop.optimizer)


LOOPS: dict[str, tuple[object, Callable[[Loop], None]]] = {
    "no_sync": (RANK_DAD, accumulates),
    "every": (og.RankDAD(rank=2, every=2), plain),
    "each its own every": (og.PerLayer({"0.*": og.RankDAD(rank=2, every=3), "*": RANK_DAD}), plain),
    "local steps": (og.LocalSteps(2, method=RANK_DAD), plain),
    "a plan that changes": (og.DAD(always=True), changes),
    "two rounds that change": (og.RankDAD(rank=8, reduce="two_way"), changes),
    "begun again": (og.DAD(always=True), begins_again),
    "two rounds begun again": (og.RankDAD(rank=8, reduce="two_way"), begins_again),
    "sides in turn": (SIDES_IN_TURN, plain),
    "sides in turn that change": (BESIDE_ROWS, changes),
    "sides in turn begun again": (BESIDE_ROWS, begins_again),
    "sides in turn and a backward that raises": (SIDES_IN_TURN, raises),
    "sides in turn, flush, state and make_equal": (SIDES_IN_TURN, asks_in_between),
    "a backward that raises": (RANK_DAD, raises),
    "flush, state and make_equal": (RANK_DAD, asks_in_between),
}


@pytest.mark.parametrize("label", rest_slow(LOOPS, [*LOOPS][::3]))
def test_a_loop_goes_as_without_turns(label, monkeypatch):
    method, drive = LOOPS[label]

    def body(rank: int, group: dist.ProcessGroup) -> tuple[list[Tensor], int]:
        loop = Loop(group, method)
        drive(loop)
        loop.session.detach()
        return loop.found, loop.most_ahead

    found = run_ranks(2, body)
    assert all(ahead for _, ahead in found), "no receive was posted ahead: this tests nothing"
    monkeypatch.setattr(transport_state, "MOST_TURNS", 0)
    for (ours, _), (plainly, ahead) in zip(found, run_ranks(2, body), strict=True):
        assert ahead == 0
        assert all(map(torch.equal, ours, plainly))


def test_a_mesh_goes_as_without_turns(monkeypatch):
    def body(mesh):
        model, found = copy.deepcopy(MODEL), []
        session = og.distribute(model, RANK_DAD, mesh=mesh)
        for k in range(6):
            model.zero_grad()
            generator = torch.Generator().manual_seed(100 * k + mesh.number)
            model(torch.randn(4, 8, generator=generator)).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters()]
        ahead = len(session._at.comm._posted)
        session.detach()
        return found, ahead

    found = run_mesh(2, 2, body)
    assert any(ahead for _, ahead in found)
    monkeypatch.setattr(transport_state, "MOST_TURNS", 0)
    for (ours, _), (plainly, _) in zip(found, run_mesh(2, 2, body), strict=True):
        assert all(map(torch.equal, ours, plainly))


def test_a_site_that_has_left_in_order_is_an_error_in_time():
    """Though receives for its next message are posted."""

    def body(rank, group):
        loop = Loop(group, RANK_DAD, patience_s=1.0)
        plain(loop)
        assert loop.most_ahead
        if rank == 0:
            loop.session.detach()
            return
        loop.step(8)

    left, stayed = try_ranks(2, body)
    assert left is None
    assert isinstance(stayed, og.SiteLostError)


def test_a_model_that_was_detached_is_kept_by_no_receive():
    def body(rank, group):
        loop = Loop(group, RANK_DAD)
        plain(loop)
        loop.session.detach()
        return ref(loop.model), group

    found = run_ranks(2, body)
    gc.collect()
    assert [model() for model, _ in found] == [None, None]
