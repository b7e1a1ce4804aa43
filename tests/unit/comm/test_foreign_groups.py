"""Process groups of other backends than PyTorch's, with a store that it made for them or none."""

from __future__ import annotations

import threading
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import outergrad as og
from foreign_group import ForeignGroup
from loops import METHODS, SOME, assert_close, batch, loss_of, net, pooled
from patience import distribute_then_hurry
from ranks import raise_first, run_ranks, try_ranks


class Raises(ForeignGroup):
    """Has no word for a store at all."""

    def get_group_store(self) -> Any:
        raise NotImplementedError("no store")


KINDS: dict[str, tuple[Any, bool]] = {
    "registered": (ForeignGroup, True),
    "unknown": (ForeignGroup, False),
    "raises": (Raises, False),
    "raises, registered": (Raises, True),
}
"""The class, and whether PyTorch has kept a store for the group."""


@pytest.fixture
def died(monkeypatch):
    """What has ended a thread."""
    found: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: found.append(args.exc_value))
    return found


def on_foreign(kind: str, body: Any, timeout: timedelta = timedelta(seconds=20)) -> list[Any]:
    """Runs body(rank, group) on two sites whose groups are of that kind."""
    made, registered = KINDS[kind]
    stores, groups = dist.distributed_c10d._world.pg_map, list[Any]()

    def inside(rank: int, inner: dist.ProcessGroup) -> Any:
        group = made(inner)
        groups.append(group)
        if registered:  # as init_process_group and new_group do
            stores[group] = "foreign", inner.get_group_store()
        return body(rank, group)

    try:
        return try_ranks(2, inside, timeout)
    finally:
        for group in groups:
            stores.pop(group, None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_store_is_the_one_that_pytorch_has_kept(kind, died):
    def body(rank, group):
        session = og.distribute(net(), og.DAD(always=True), group=group)
        has_board = session._at.comm.board is not None
        session.detach()
        return has_board

    assert on_foreign(kind, body) == [KINDS[kind][1]] * 2
    assert not died


@pytest.mark.usefixtures("large_matrices")
@pytest.mark.parametrize("kind", ["registered", "unknown"])
@pytest.mark.parametrize("method", SOME)
def test_it_trains_and_ends_in_order(method, kind, died):
    def body(rank, group):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session = og.distribute(model, METHODS[method], group=group)
        for k in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(rank, k, 2)).backward()
            optimizer.step()
        session.flush()
        session.detach()
        return [p.detach().clone() for p in model.parameters()]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = raise_first(on_foreign(kind, body))
    assert not died
    assert all(map(torch.equal, first, second))
    steps = [[(0.5, batch(site, k, 2)) for site in (0, 1)] for k in range(3)]
    make = lambda params: torch.optim.SGD(params, lr=0.05)  # noqa: E731
    assert_close(first, pooled(lambda _, optimizer: optimizer.step(), steps, make), 2e-4)


@pytest.mark.parametrize("kind", ["registered", "unknown"])
def test_a_site_that_does_not_come_is_lost(kind, died):
    def body(rank, group):
        model = net()
        session = distribute_then_hurry(model, og.DAD(always=True), group=group)
        if rank == 1:
            session.detach()
            return None
        loss_of(model, batch(rank, 0)).backward()
        return None

    error, _ = on_foreign(kind, body, timedelta(seconds=5))
    assert isinstance(error, og.SiteLostError)
    assert ("its session had ended" in str(error)) == (kind == "registered")
    assert not died


def test_bytes_are_those_of_a_group_of_gloo():
    def sent(rank: int, group: Any) -> int:
        model = net()
        session = og.distribute(model, og.DAD(always=True), group=group)
        loss_of(model, batch(rank, 0)).backward()
        total = session.stats().total_sent_bytes
        session.detach()
        return total

    assert on_foreign("registered", sent) == run_ranks(2, sent)
