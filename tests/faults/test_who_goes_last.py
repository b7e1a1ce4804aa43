"""The site that holds the store stays until the others have compared; they say if they cannot."""

from __future__ import annotations

import copy
import os
import threading
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from faulty import own_comm
from torch import nn

import outergrad as og
from cases import mlp
from outergrad.comm.backends import ends_with_a_site
from outergrad.comm.failure_report import FailureReport
from outergrad.commit.board_io import performed
from outergrad.commit.digests import Digests
from outergrad.step.transport_state import on_transport
from patience import distribute_then_hurry
from ranks import run_ranks

X = [torch.randn(4, 6, generator=torch.Generator().manual_seed(s)) for s in range(3)]
torch.manual_seed(3)
MODEL = nn.Sequential(mlp(6, 8, 8), nn.Linear(8, 5))
STEPS = 5


def damage_at_last_site(sites):
    def change(rank, index, parts):
        if rank == sites - 1 and index == 0:
            parts[0].view(-1).view(torch.uint8)[parts[0].nbytes // 2] ^= 4

    return staticmethod(change)


def trained(rank, group, patience_s=5.0):
    """A session after some steps, the third of which was damaged; site 0 holds the store."""
    model = copy.deepcopy(MODEL)
    session = distribute_then_hurry(model, og.Dense(), group=group, patience_s=patience_s)
    for step in range(STEPS):
        own_comm().armed = step == 2
        model.zero_grad()
        (model(X[rank] + 0.1 * step) ** 2).mean().backward()
    session._at.comm.holds_board = rank == 0
    return session


@pytest.mark.parametrize("when", ["state_dict", "detach"])
@pytest.mark.parametrize("sites", [2, 3])
def test_a_site_that_settles_after_the_store_has_ended_compares_nevertheless(
    faulty_transport, sites, when
):
    """It computed while site 0 settled and ended; its watcher has read what the others received."""
    faulty_transport.change = damage_at_last_site(sites)
    ended = threading.Event()

    def body(rank, group):
        session = trained(rank, group)
        if rank > 0:
            assert ended.wait(10.0)
            session._at.comm.board._gone = True
        try:
            with pytest.raises(og.DriftError) as caught:
                getattr(session, when)()
        finally:
            ended.set()
        session.detach()
        return str(caught.value)

    assert len(set(run_ranks(sites, body))) == 1


def test_who_cannot_compare_any_more_says_so(faulty_transport):
    """By an error that names the site with which the store went."""

    def body(rank, group):
        session = trained(rank, group)
        if rank == 0:
            on_transport(group).end_watching()
            return None
        session._at.comm.board._gone = True
        with pytest.raises(og.SiteLostError, match="received in the steps 1 to 4") as e:
            session.state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            session.detach()  # it has been said
        return e.value.sites, e.value.step

    assert run_ranks(2, body)[1] == ((0,), STEPS)


@pytest.mark.parametrize("end", ["detach", "settle_at_exit"])
def test_who_cannot_compare_any_more_says_so_when_it_ends(faulty_transport, end):
    """It has all steps, so that its program goes on; so does the end of Python."""

    def body(rank, group):
        session = trained(rank, group)
        if rank == 0:
            on_transport(group).end_watching()
            return
        session._at.comm.board._gone = True
        with pytest.warns(RuntimeWarning, match="site 1 lost site 0 before the sites had compared"):
            getattr(session, end)()

    run_ranks(2, body)


def test_the_host_waits_no_longer_than_for_a_message(faulty_transport):
    """Site 1 is gone after it told what it had received, before it read that of the others."""
    gone = threading.Event()

    def body(rank, group):
        session = trained(rank, group, patience_s=1.0)
        if rank == 1:
            on_transport(group).end_watching()
            participant = on_transport(group).participant
            digests = Digests(1, 2, participant.made, participant.told)
            performed(session._at.comm.board, digests.tell())
            gone.set()
            return 0.0
        assert gone.wait(10.0)
        began = time.monotonic()
        session.state_dict()
        return time.monotonic() - began

    assert 0.9 < run_ranks(2, body)[0] < 4.0


def test_what_a_site_received_stands_in_the_word_of_its_end():
    word = FailureReport(5, made=5, ended="session", digests={11: (1 << 61) - 2, 12: 0})
    assert FailureReport.of(word.text()) == word
    assert FailureReport.of(word.text().replace('"12": 0', '"12": -1')) is None


@pytest.mark.parametrize("own", [True, False])
def test_a_store_ends_with_a_site_unless_torchruns_agent_holds_it(own, monkeypatch):
    monkeypatch.setitem(os.environ, "TORCHELASTIC_USE_AGENT_STORE", str(not own))
    limit = timedelta(seconds=5)
    store = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
    assert ends_with_a_site(dist.PrefixStore("a", dist.PrefixStore("b", store))) == own
    assert not ends_with_a_site(dist.PrefixStore("a", dist.HashStore()))
