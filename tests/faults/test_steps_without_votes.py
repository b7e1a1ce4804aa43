"""Sites vote on one step of sixteen: what came in the others is compared then, or at the end."""

from __future__ import annotations

import copy
import re
import threading
import time
from contextlib import suppress

import pytest
import torch
from faulty import own_comm
from torch import nn
from torch.optim import SGD

import outergrad as og
from cases import mlp
from covering import covering
from outergrad.messages.vote import WORDS
from outergrad.step.transport_state import on_transport
from patience import distribute_then_hurry
from ranks import run_on_lasting_groups, run_ranks

DAMAGED = 3
METHODS = {"dense": og.Dense(), "dad": og.DAD(always=True), "rank-dad": og.RankDAD(rank=2)}
X = [torch.randn(4, 6, generator=torch.Generator().manual_seed(s)) for s in range(3)]
MODEL = nn.Sequential(mlp(6, 8, 8), nn.Linear(8, 5))


def backward(model, rank, step=0):
    model.zero_grad()
    (model(X[rank] + 0.1 * step) ** 2).mean().backward()


def damage(parts):
    parts[0].view(-1).view(torch.uint8)[parts[0].nbytes // 2] ^= 4


def last_site_is_damaged(sites):
    def change(rank, index, parts):
        if rank == sites - 1 and index == 0:
            damage(parts)

    return staticmethod(change)


def trained(rank, group, steps):
    """A model and its session after so many steps, one of which was damaged."""
    model = copy.deepcopy(MODEL)
    session = og.distribute(model, og.Dense(), group=group)
    for step in range(steps):
        own_comm().armed = step == DAMAGED
        backward(model, rank, step)
    return model, session


@pytest.mark.parametrize(("name", "sites"), covering(list(METHODS), [2, 3], quick=2))
def test_sites_vote_on_one_step_of_sixteen(name, sites):
    """A step sends nothing but what it is about, otherwise."""

    def body(rank, group):
        model, sent = copy.deepcopy(MODEL), []
        session = og.distribute(model, METHODS[name], group=group)
        for step in range(35):
            backward(model, rank, step)
            sent.append(session.stats().sent_bytes)
        session.detach()
        return sent

    for sent in run_on_lasting_groups(sites, body):
        usual = sent[2]
        assert [step for step in range(2, 35) if sent[step] != usual] == [16, 32]
        assert sent[16] == sent[32] == usual + 8 * WORDS * (sites - 1)


@pytest.mark.parametrize("sites", [2, 3])
def test_a_damaged_sum_is_found_by_the_next_vote(faulty_transport, sites):
    """On all sites in the same words; they go on once they are equal again."""
    faulty_transport.change = last_site_is_damaged(sites)

    def body(rank, group):
        model, session = trained(rank, group, 17)
        with pytest.raises(og.DriftError) as caught:
            backward(model, rank, 17)
        assert all(p.grad is None for p in model.parameters())
        session.make_equal()
        for step in range(40):
            backward(model, rank, step)
        session.detach()
        return str(caught.value), caught.value.sites, caught.value.step

    found = run_on_lasting_groups(sites, body)
    assert len(set(found)) == 1
    assert found[0][1:] == ((2,) if sites == 3 else (0, 1), 17)
    assert "one of the steps 1 to 16, which sites have applied" in found[0][0]
    assert "Step 17 was not applied on any site" in found[0][0]


@pytest.mark.parametrize("when", ["state_dict", "flush", "detach"])
@pytest.mark.parametrize("sites", [2, 3])
def test_a_damaged_sum_is_found_when_the_session_settles(faulty_transport, sites, when):
    faulty_transport.change = last_site_is_damaged(sites)

    def body(rank, group):
        _, session = trained(rank, group, 6)
        with pytest.raises(og.DriftError) as caught:
            getattr(session, when)()
        session.detach()
        return str(caught.value), caught.value.sites

    found = run_on_lasting_groups(sites, body)
    assert len(set(found)) == 1
    assert found[0][1] == ((2,) if sites == 3 else (0, 1))
    assert "one of the steps 1 to 5" in found[0][0]


def surprised(model, rank, step):
    """The first layer is used no more, which the plan did not know: all vote on the step."""
    model.zero_grad()
    (model[1](torch.ones(2, 8)) ** 2).mean().backward()


def skipped(model, rank, step):
    model.zero_grad()
    (model(X[rank]) * (torch.nan if rank == 0 else 1.0)).sum().backward()


def raised(model, rank, step):
    model.zero_grad()
    loss = model(X[rank]).sum()
    if rank == 0:
        loss.register_hook(failing)
    with suppress(RuntimeError):
        loss.backward()


def failing(_):
    raise RuntimeError("a user's backward fails")


@pytest.mark.parametrize("last", [surprised, skipped, raised])
@pytest.mark.parametrize(("sites", "steps"), [(2, 1), (3, 2)])
def test_a_damaged_sum_is_found_though_sites_voted_on_later_steps(
    faulty_transport, sites, steps, last
):
    """Their votes are about these alone: digests of the steps before are compared at the end."""
    faulty_transport.change = last_site_is_damaged(sites)

    def body(rank, group):
        model, session = trained(rank, group, DAMAGED + 1)
        own_comm().armed = False
        for step in range(steps):
            last(model, rank, step)
        with pytest.raises(og.DriftError) as caught:
            session.state_dict()
        session.detach()
        return str(caught.value), caught.value.sites

    found = run_on_lasting_groups(sites, body)
    assert len(set(found)) == 1
    assert found[0][1] == ((2,) if sites == 3 else (0, 1))
    assert re.search("one of the steps 1 to [345]", found[0][0])


@pytest.mark.parametrize("name", METHODS)
def test_one_site_settles_while_the_others_compute(name):
    """Their watchers answer it; all have made the same steps then, and go on."""
    settled = threading.Event()

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        optimizer = SGD(model.parameters(), lr=0.1)
        session = og.distribute(model, METHODS[name], group=group)
        for step in range(8):
            backward(model, rank, step)
            optimizer.step()
            if step == 4 and rank == 0:
                session.state_dict()
                settled.set()
            elif step == 4:
                assert settled.wait(10.0)
        session.detach()
        return list(model.parameters())

    first, *others = run_on_lasting_groups(3, body)
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("when", ["state_dict", "flush"])
def test_a_site_that_died_after_the_last_step_is_named_when_the_session_settles(when):
    dead = threading.Event()

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = distribute_then_hurry(model, og.Dense(), group=group)
        for step in range(3):
            backward(model, rank, step)
        if rank == 1:
            on_transport(session._at.comm.key).end_watching()
            with suppress(RuntimeError):
                session._at.comm.close()
            dead.set()
            return None
        dead.wait(10.0)
        began = time.monotonic()
        with pytest.raises(og.SiteLostError) as caught:
            getattr(session, when)()
        assert time.monotonic() - began < 10
        return caught.value.sites, caught.value.step

    assert run_ranks(2, body)[0] == ((1,), 3)


@pytest.mark.parametrize("last", [0, 1])
def test_each_session_of_a_group_finds_its_own_damaged_sum(faulty_transport, last):
    """Also the one that did not make the last step."""
    faulty_transport.change = last_site_is_damaged(2)

    def body(rank, group):
        models = [copy.deepcopy(MODEL), mlp(6, 9, 5)]
        sessions = [og.distribute(model, og.Dense(), group=group) for model in models]
        comm = sessions[0]._at.comm
        for step in range(5):
            comm.armed = step == DAMAGED
            backward(models[0], rank, step)
            comm.armed = False
            backward(models[1], rank, step)
        if last == 0:
            backward(models[0], rank, 5)
        sessions[1].state_dict()
        with pytest.raises(og.DriftError, match="one of the steps 1 to"):
            sessions[0].state_dict()
        for session in sessions:
            session.detach()

    run_on_lasting_groups(2, body)


def test_two_sessions_of_one_group_settle_each_by_itself():
    def body(rank, group):
        models = [copy.deepcopy(MODEL), mlp(6, 9, 5)]
        sessions = [og.distribute(model, group=group) for model in models]
        for step in range(5):
            backward(models[0], rank, step)
            backward(models[1], rank, step)
        if rank == 0:
            sessions[0].state_dict()
        sessions[1].state_dict()
        backward(models[0], rank, 5)
        for session in sessions:
            session.detach()
        return [p.grad for p in models[0].parameters()]

    first, second = run_on_lasting_groups(2, body)
    assert all(map(torch.equal, first, second))
