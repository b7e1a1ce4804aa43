"""Who was lost where no single message tells it: in distribute, in sums, without a store."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import outergrad as og
from cases import mlp
from outergrad.comm import failure_mailbox
from outergrad.comm.failure_mailbox import FailureMailbox
from outergrad.comm.torch import TorchComm
from patience import distribute_then_hurry
from ranks import run_ranks

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class StoodStillError(Exception):
    """What a stopped site raises in place of standing still."""


def leave_out(after: int):
    """The last of three sites sends no more than so many messages in distribute."""

    class Comm(TorchComm):
        def _due(self) -> None:
            self.seen = getattr(self, "seen", 0) + 1
            if self.rank == 2 and self.seen > after:
                time.sleep(1.5)
                raise StoodStillError

        def all_gather(self, *args, **kwargs):
            self._due()
            return super().all_gather(*args, **kwargs)

        def broadcast(self, t):
            self._due()
            super().broadcast(t)

    return Comm


@pytest.mark.parametrize("after", [0, 1])
def test_a_site_that_hangs_in_distribute_is_lost(monkeypatch, after):
    """In the agreement, and while parameters travel, which the group's timeout would not end."""
    monkeypatch.setattr("outergrad.comm.process_group.TorchComm", leave_out(after))

    def body(rank, group):
        began = time.monotonic()
        with pytest.raises((og.SiteLostError, StoodStillError)) as caught:
            og.distribute(mlp(6, 8, 5), group=group, timeout=0.5)
        if rank == 2:
            return None
        assert time.monotonic() - began < 0.5 + 4.0
        assert "og.distribute on all sites" in caught.value.place
        with pytest.raises(og.SiteLostError):
            og.distribute(mlp(6, 8, 5), group=group)
        return caught.value.sites

    found = run_ranks(3, body)
    assert after or found[:2] == [(2,), (2,)]


def test_who_is_late_for_a_sum_is_named():
    """In an all-reduce nobody can tell for whom it waits: but who is late has not waited."""

    def body(rank, group):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 24), nn.Linear(24, 24))
        distribute_then_hurry(model, og.PowerSGD(rank=2), group=group)
        for step in range(3):
            h = model[0](X)
            late = rank == 2 and step == 1
            h.register_hook(lambda delta, late=late: time.sleep(1.5 * late))
            try:
                model[1](h).sum().backward()
            except og.SiteLostError as error:
                return error.sites, error.step
        return None

    assert run_ranks(3, body)[:2] == [((2,), 1)] * 2


class Stopped:
    """A store whose server stands still."""

    def __init__(self) -> None:
        self.calls, self.end = 0, threading.Event()

    def set(self, *_):
        self.calls += 1
        self.end.wait(20)

    check = get = set


def test_a_store_that_stands_still_costs_its_limit_once(monkeypatch):
    monkeypatch.setattr(failure_mailbox, "_LIMIT_S", 0.3)
    store = Stopped()
    words, began = FailureMailbox(store, 1, 4), time.monotonic()
    words.leave("mine")
    assert words.gather(lambda texts: False, patience_s=10.0) is None
    assert time.monotonic() - began < 2.0
    assert store.calls == 1
    store.end.set()


def test_who_leaves_stays_until_the_others_have_read():
    """The store may end with its process."""
    store = dist.HashStore()
    first, second = (FailureMailbox(store, rank, 2) for rank in range(2))
    done = []

    def enough(texts):
        return None not in texts

    def leave_first():
        done.append(first.gather(enough, 5.0))

    first.leave("a")
    second.leave("b")
    thread = threading.Thread(target=leave_first)
    thread.start()
    time.sleep(0.2)
    assert not done
    assert second.gather(enough, 5.0) == ["a", "b"]
    thread.join(5.0)
    assert done == [["a", "b"]]
