"""A site that lacks a message of a step that others have made gets what it brought, to the bit."""

from __future__ import annotations

import copy
import gc
import threading
import time
from functools import partial
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from faulty import own_comm
from torch import nn
from torch.optim import Adam

import outergrad as og
from cases import METHODS, mlp
from covering import covering
from outergrad.comm.board import StoreBoard
from outergrad.commit.participant import CommitParticipant
from outergrad.commit.step_result import StepResult
from outergrad.commit.watcher import POLL_S, Watcher
from outergrad.core.errors import BoardGoneError, ExchangeError, Failure
from outergrad.step.transport_state import on_transport
from ranks import run_ranks

LAST = 3
X = [torch.randn(8, 6, generator=torch.Generator().manual_seed(s)) for s in range(3)]
torch.manual_seed(3)
MODEL = nn.Sequential(mlp(6, 24, 24), nn.BatchNorm1d(24), nn.Linear(24, 5))
TABLE = {
    **{name: METHODS[name] for name in ("dense", "dad", "dad forced", "sparse, all entries")},
    "small buckets": og.DAD(always=True, bucket_bytes=1),
    "two ways": og.RankDAD(rank=1, reduce="two_way"),
    "two ways, signs": og.Sparse(
        density=0.5, select="random", wire=og.wire.Sign(), reduce="two_way", always=True
    ),
    "blocks, which wait for votes": og.EDAD(blocks=["0"], inputs="raw", always=True),
    "sketches, which wait for votes": og.PowerSGD(rank=1),
}


NEED_MORE = (
    "two ways",
    "two ways, signs",
    "blocks, which wait for votes",
    "sketches, which wait for votes",
)
"""What site 1 sends next, or says, the others cannot do without."""


def backward(model, rank, step):
    model.zero_grad()
    (model(X[rank] + 0.1 * step) ** 2).mean().backward()


@pytest.mark.parametrize(
    ("name", "kind", "sites", "model"),
    covering(list(TABLE), ["payload", "vote"], [2, 3], ["plain", "averaged"], quick=8, every=4),
)
def test_a_site_that_lacks_a_message_gets_the_step(faulty, name, kind, sites, model):
    """Site 1 loses its connections while it waits for the last message, or for votes before."""
    own = {"buffers": "mean"} if model == "averaged" else {"buffers": "local"}
    lost = []

    def change(rank, index, parts):
        if rank == 1 and own_comm().armed and not lost:
            lost.append(index)
            time.sleep(0.2)  # all that it has sent is there
            raise ExchangeError("closed", (0,), kind=Failure.CLOSED)

    faulty.change, faulty.kind = staticmethod(change), kind

    def body(rank, group):
        replica = copy.deepcopy(MODEL)
        optimizer = Adam(replica.parameters(), lr=0.01)
        og.distribute(replica, TABLE[name], group=group, timeout=10.0, **own)
        for step in range(LAST):
            backward(replica, rank, step)
            optimizer.step()
        own_comm().armed = True
        state = []
        for step in range(LAST, LAST + 4):
            try:
                backward(replica, rank, step)
            except og.SiteLostError as raised:
                return raised, state
            optimizer.step()
            shared = replica.parameters() if model == "plain" else replica.state_dict().values()
            state = [t.detach().clone() for t in shared]
        raise AssertionError("nobody noticed")

    (error, first), *others = run_ranks(sites, body)
    assert lost
    assert error.step > LAST or name in NEED_MORE
    for other_error, state in others:
        assert error.step == other_error.step
        assert not error.may_differ
        assert not other_error.may_differ
        assert all(map(torch.equal, first, state))


def test_what_a_step_brought_is_read_as_it_was():
    means = {"a": torch.randn(3, 2), "b": torch.randn(0, 2)}
    added = {"c": torch.randn(4).bfloat16(), "d": torch.randn((), dtype=torch.float64)}
    buffers = {"n": torch.tensor(3)}
    found = StepResult.of(StepResult(True, means, added, buffers).packed())
    assert found is not None
    assert found.applied
    for part, same in ((means, found.means), (added, found.additions), (buffers, found.buffers)):
        assert list(part) == list(same)
        assert all(torch.equal(part[n], same[n]) and part[n].dtype == same[n].dtype for n in part)
    void = StepResult.of(StepResult(False).packed())
    assert void is not None
    assert not void.applied


def test_what_cannot_be_read_is_as_if_nothing_were_there():
    content = StepResult(True, {"a": torch.ones(3)}).packed()
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        damaged = bytearray(content)
        place = int(torch.randint(len(content), (), generator=generator))
        damaged[place] ^= 1 << int(torch.randint(8, (), generator=generator))
        found = StepResult.of(bytes(damaged))
        assert (
            found is None
            or set(found.means) != {"a"}
            or torch.equal(found.means["a"], torch.ones(3))
        )
    assert StepResult.of(b"") is None
    assert StepResult.of(content[:20]) is None


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix"])
def test_a_slot_is_written_once(kind, tmp_path):
    inner = dist.FileStore(str(tmp_path / "store"), 1) if kind == "file" else dist.HashStore()
    store = dist.TCPStore("127.0.0.1", 0, 1, True) if kind == "tcp" else inner
    store = dist.PrefixStore("run/", store) if kind == "prefix" else store
    board, other = StoreBoard(store), StoreBoard(store)
    assert board.slot("word") is None
    assert board.first("word", "mine") == "mine"
    assert other.first("word", "theirs") == "mine"
    assert other.slot("word") == "mine"
    large = bytes(range(256)) * 3000
    board.put("step", large)
    assert board.get("step") == large
    assert other.get("step") == large
    assert other.get("nothing") is None


def test_a_board_that_does_not_answer_is_gone(monkeypatch):
    monkeypatch.setattr("outergrad.comm.board._LIMIT_S", 0.05)
    stuck = threading.Event()

    class Store:
        def compare_set(self, *_):
            stuck.wait(10.0)

    board = StoreBoard(Store())
    for _ in range(2):
        with pytest.raises(BoardGoneError):
            board.first("word", "mine")
    stuck.set()


def test_a_watcher_ends_with_the_last_session():
    def body(rank, group):
        sessions = [og.distribute(mlp(6, 8, 5), group=group) for _ in range(2)]
        watcher = on_transport(group).watcher
        assert watcher._thread.is_alive()
        sessions[0].detach()
        assert watcher._thread.is_alive()
        sessions[1].detach()
        assert not watcher._thread.is_alive()

    run_ranks(2, body)


def test_a_watcher_stays_as_long_as_any_session():
    """Also where the first one, whose transport it began with, is gone."""

    def body(rank, group):
        sessions = [og.distribute(mlp(6, 8, 5), group=group) for _ in range(2)]
        watcher, comm = on_transport(group).watcher, ref(sessions[0]._at.comm)
        sessions.pop(0).detach()
        until = time.monotonic() + 10.0
        while comm() is not None and time.monotonic() < until:
            gc.collect()  # does nothing while another thread's is under way
            time.sleep(0.01)
        assert comm() is None
        watcher._thread.join(3 * POLL_S)
        assert watcher._thread.is_alive()
        assert on_transport(group).watcher is watcher
        sessions[0].detach()
        assert not watcher._thread.is_alive()

    run_ranks(2, body)


class Looked:
    """A transport of which only the board is used."""

    rank, min_sites = 0, None

    def __init__(self, store):
        self.board = StoreBoard(store)


def test_a_watcher_looks_without_beginning_threads(monkeypatch):
    looks, comm = threading.Semaphore(0), Looked(dist.HashStore())

    def look(key):
        looks.release()

    monkeypatch.setattr(StoreBoard, "_read", lambda board, key: board._limited(partial(look, key)))
    watcher = Watcher(comm, CommitParticipant(), {})
    starters = []
    begin = threading.Thread.start

    def begin_told(thread):
        starters.append(threading.current_thread())
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", begin_told)
    for _ in range(4):
        assert looks.acquire(timeout=10.0)
    assert watcher._thread not in starters
    watcher.end()
    assert not watcher._thread.is_alive()


def test_a_watcher_ends_when_no_transport_is_left():
    first, second = (Looked(dist.HashStore()) for _ in range(2))
    watcher = Watcher(first, CommitParticipant(), {})
    assert watcher.takes(second)
    del first
    watcher._thread.join(3 * POLL_S)
    assert watcher._thread.is_alive()
    del second
    watcher._thread.join(10.0)
    assert not watcher._thread.is_alive()
    assert not watcher.takes(Looked(dist.HashStore()))
