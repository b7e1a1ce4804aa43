"""Whether a step counts elsewhere is said where it is known, and that it is not where it is not."""

from __future__ import annotations

import copy
import random
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from faulty import Died, own_comm
from torch.optim import SGD

import outergrad as og
from cases import mlp
from covering import covering
from outergrad.comm.failure_mailbox import FailureMailbox
from outergrad.comm.failure_report import FailureReport, LastStep
from outergrad.commit.lost import Findings, find_out, lost_error
from outergrad.core.sites import sites_of
from patience import distribute_then_hurry
from ranks import run_ranks

SESSION, OTHER, STEP = 11, 12, 4
X = [torch.randn(4, 6, generator=torch.Generator().manual_seed(s)) for s in range(3)]
torch.manual_seed(3)
MODEL = mlp(6, 8, 5)


class StoreComm:
    """A transport of which only the store is left, if that is."""

    host = 0

    def __init__(self, store, rank, sites=3, patience_s=0.1):
        self.rank, self.world_size, self.patience_s, self._store = rank, sites, patience_s, store

    def give_up(self, text, final, enough, patience_s, session=0):
        words = FailureMailbox(self._store, self.rank, self.world_size, session)
        words.leave(text)
        return words.gather(enough, patience_s, final)


HERE = SimpleNamespace(rank=0, sites=sites_of(3, ()), mesh=None)


def voted(gone=(), silent=(), **about):
    """Of a site that has said that step STEP may count, and lost others then."""
    ends = {SESSION: LastStep(STEP, True)}
    return FailureReport(STEP, SESSION, voted=True, gone=gone, silent=silent, ends=ends, **about)


def at(steps, session=SESSION, *, counted=True, **about):
    """Of a site that has made so many steps."""
    return FailureReport(steps, session, ends={session: LastStep(steps, counted)}, **about)


def found_by_site_0(standing, others, monkeypatch, at_exit=(), at_end=()):
    """What it finds, where the others have left this."""
    monkeypatch.setattr("outergrad.comm.failure_mailbox._LIMIT_S", 0.1)
    store = dist.HashStore()
    for site, text in others.items():
        words = FailureMailbox(store, site, 3, SESSION)
        if site in (*at_exit, *at_end):
            words.leave_at_end(text, of_process=site in at_exit)
        else:
            words.leave(text)
    return find_out(StoreComm(store, 0), standing)


def words_of(found):
    return str(lost_error(HERE, STEP, "votes", RuntimeError("closed"), found))


def test_a_site_that_computes_for_longer_than_the_timeout_may_have_applied_the_step(monkeypatch):
    """Site 1 died, site 2 has left no word: only site 1 is lost, but nothing is known of site 2."""
    found = found_by_site_0(voted(gone=(1,)), {}, monkeypatch)
    assert (found.lost, found.counted, found.certain) == ((1,), False, False)
    assert found.may_differ == (1, 2)
    assert "sites 1, 2 may have applied it" in words_of(found)
    assert "any site" not in words_of(found)


def test_who_has_not_voted_knows_that_the_step_counts_nowhere(monkeypatch):
    found = found_by_site_0(replace(voted(gone=(1,)), voted=False), {}, monkeypatch)
    assert found.certain
    assert not found.counted
    assert found.may_differ == (1, 2)
    assert "not applied on any site" in words_of(found)


def test_all_have_said_that_they_have_not_applied_it(monkeypatch):
    others = {1: voted(gone=(0,)).text(), 2: at(STEP, gone=(1,)).text()}
    found = found_by_site_0(voted(gone=(1,)), others, monkeypatch)
    assert (found.certain, found.may_differ, found.counted) == (True, (), False)


def test_a_step_that_another_site_discarded_does_not_count(monkeypatch):
    """That site is a step further, but it has not applied this one."""
    others = {2: at(STEP + 1, counted=False, gone=(1,)).text()}
    found = found_by_site_0(voted(gone=(1,)), others, monkeypatch)
    assert (found.counted, found.certain) == (False, True)


@pytest.mark.parametrize("how", ["gave up", "ended its session", "ended its process"])
def test_a_step_that_another_site_applied_counts(monkeypatch, how):
    ended = {"gave up": "", "ended its session": "session", "ended its process": "process"}[how]
    others = {2: at(STEP + 1, ended=ended).text()}
    places = {"at_exit": (2,) * (ended == "process"), "at_end": (2,) * (ended == "session")}
    found = found_by_site_0(voted(gone=(1,)), others, monkeypatch, **places)
    assert found.counted
    assert found.lost == (1,)


def test_steps_of_another_session_tell_nothing(monkeypatch):
    found = found_by_site_0(voted(gone=(1,)), {2: at(50, OTHER).text()}, monkeypatch)
    assert (found.counted, found.certain, found.may_differ) == (False, False, (1, 2))


def test_who_stays_a_step_behind_is_named(monkeypatch):
    """Site 2 stopped looking for the others' words before this one left its own."""
    late = replace(voted(gone=(1,)), settled=True).text()
    standing = FailureReport(STEP + 1, SESSION, gone=(2,), ends={SESSION: LastStep(STEP + 1, True)})
    found = found_by_site_0(standing, {1: at(STEP + 1, gone=(2,)).text(), 2: late}, monkeypatch)
    assert found.certain
    assert found.may_differ == (2,)


def test_who_stays_a_step_behind_in_another_session_is_named(monkeypatch):
    """This site applied a step of one model, which site 2 has not heard, and went to the other."""
    late = replace(voted(gone=(1,)), settled=True)
    late = replace(late, ends={**late.ends, OTHER: LastStep(0)}).text()
    ends = {SESSION: LastStep(STEP + 1, True), OTHER: LastStep(0)}
    found = found_by_site_0(FailureReport(0, OTHER, gone=(2,), ends=ends), {2: late}, monkeypatch)
    assert 2 in found.may_differ


def test_where_a_connection_was_reset_nobody_is_lost(monkeypatch):
    others = {1: at(STEP, gone=(0,)).text(), 2: at(STEP, gone=(0,)).text()}
    found = found_by_site_0(at(STEP, gone=(1,)), others, monkeypatch)
    assert found.lost == ()
    assert "lost a connection, while all sites live" in words_of(found)


def test_nothing_is_said_of_sites_of_which_nothing_is_known():
    found = Findings((), doubt="the store of the group is gone")
    assert words_of(found).startswith(f"site 0 lost the others in step {STEP}")


@pytest.mark.parametrize("text", ["", "null", "{" * 5000, "x" * 10**6, '{"step": "a"}'])
def test_what_cannot_be_read_is_as_if_nothing_were_known(monkeypatch, text):
    found = found_by_site_0(voted(gone=(1,)), {2: text}, monkeypatch)
    assert (found.counted, found.certain, found.may_differ) == (False, False, (1, 2))


def test_whose_program_raised_is_told_in_its_own_words(monkeypatch):
    others = {1: FailureReport(0, why="ValueError: no rows\x1b[2J", ended="process").text()}
    found = found_by_site_0(at(STEP, gone=(1,)), others, monkeypatch, at_exit=(1,))
    assert found.lost == (1,)
    assert "site 1 left word that it ended with ValueError: no rows [2J" in words_of(found)


@pytest.mark.parametrize("seed", range(12))
def test_of_two_sites_that_differ_the_one_behind_or_both_know(seed, monkeypatch):
    """Site 1 has applied the step and gives up about when the patience of site 0 ends."""
    monkeypatch.setattr("outergrad.comm.failure_mailbox._LIMIT_S", 0.1)
    store, found = dist.HashStore(), {}
    late_s = 0.3 + random.Random(seed).uniform(-0.02, 0.06)
    ahead = FailureReport(STEP + 1, SESSION, gone=(2,), ends={SESSION: LastStep(STEP + 1, True)})

    def give_up(rank, standing, after_s):
        time.sleep(after_s)
        found[rank] = find_out(StoreComm(store, rank, patience_s=0.3), standing)

    sites = [(0, voted(gone=(2,)), 0.0), (1, ahead, late_s)]
    threads = [threading.Thread(target=give_up, args=site) for site in sites]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    if not found[0].counted:
        assert not found[0].certain
        assert 1 in found[0].may_differ
        assert 0 in found[1].may_differ


# -- the same with sites ------------------------------------------------------------------------


METHODS = {"dad": og.DAD(), "local steps": og.LocalSteps(1, method=og.Dense())}


def weights(session, model):
    """The weights that all sites share, by name."""
    outer = getattr(session._updates, "outer", None)
    return dict(model.named_parameters()) if outer is None else outer.start


def train(model, optimizer, rank, steps):
    for step in range(steps):
        optimizer.zero_grad()
        (model(X[rank] + step) ** 2).mean().backward()
        optimizer.step()


def dying_in_the_vote(rank, group, method, *, steps, ahead):
    """Site 2 dies in the vote of the last step, which only site 0 hears; it then does `ahead`."""
    model = copy.deepcopy(MODEL)
    optimizer = SGD(model.parameters(), lr=0.01)
    session = distribute_then_hurry(model, method, group=group)
    train(model, optimizer, rank, steps - 1)
    if rank == 2:
        own_comm().dies_after_vote_to = (0,)
    error = None
    try:
        train(model, optimizer, rank, 1)
        if rank == 0:
            ahead(session)
        train(model, optimizer, rank, 1)
    except (og.SiteLostError, Died) as raised:
        error = raised
    if not isinstance(error, Died):
        session.detach()
    start = weights(session, model)
    return error, [p.detach().clone() for p in start.values()]


def same(first, second):
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize("name", METHODS)
def test_the_third_site_evaluates_for_long_after_the_step(faulty, name):
    def body(rank, group):
        evaluates = lambda session: time.sleep(3.0)  # noqa: E731
        return dying_in_the_vote(rank, group, METHODS[name], steps=3, ahead=evaluates)

    (ahead, params), (behind, other), _ = run_ranks(3, body)
    assert same(params, other), (ahead, behind)
    for error in (ahead, behind):
        assert (error.sites, error.step, error.may_differ) == ((2,), 3, (2,))


@pytest.mark.parametrize("name", METHODS)
def test_the_third_site_ends_its_session_after_the_step(faulty, name):
    """The one that did not hear the vote learns from the word of that end that the step counts."""
    gone = threading.Event()

    def body(rank, group):
        def ends(session):
            session.detach()
            gone.set()
            raise Died

        error, params = dying_in_the_vote(rank, group, METHODS[name], steps=3, ahead=ends)
        if rank == 0:
            gone.wait(10.0)
        return error, params

    (_, params), (error, other), _ = run_ranks(3, body)
    assert same(params, other)
    assert error.step == 3


WIDER = mlp(6, 24, 24, 5)
WAITING = {
    "powersgd": og.PowerSGD(rank=2),
    "rank-dad, all_reduce": og.RankDAD(rank=2, reduce="all_reduce"),
    "rank-dad, sides in turn": og.RankDAD(rank=2, reduce="alternate"),
    "sparse, random": og.Sparse(density=0.1, select="random", always=True),
    "edad": og.EDAD(always=True),
    "edad blocks": og.EDAD(blocks=["0"], inputs="raw", always=True),
    "local steps of powersgd": og.LocalSteps(1, method=og.PowerSGD(rank=2)),
}
"""Methods whose steps wait for votes, or may."""


@pytest.mark.parametrize(
    ("name", "ends", "heard_by"),
    covering(
        list(WAITING), ["detach", "state_dict", "flush"], [(0,), (1,), (0, 1)], quick=6, every=3
    ),
)
def test_a_site_dies_in_the_vote_on_the_last_step(faulty_transport, name, ends, heard_by):
    """Who has heard its vote has made the step, and goes when the others have made it, too."""

    def body(rank, group):
        model = copy.deepcopy(WIDER)
        optimizer = SGD(model.parameters(), lr=0.01)
        session = distribute_then_hurry(model, WAITING[name], group=group)
        train(model, optimizer, rank, 4)
        error = None
        try:
            if rank == 2:
                own_comm().dies_after_vote_to = heard_by
            train(model, optimizer, rank, 1)
            assert rank < 2, "the steps of this method wait for no votes"
            getattr(session, ends)()
        except (og.SiteLostError, Died) as raised:
            error = raised
        if not isinstance(error, Died):
            session.detach()
        start = weights(session, model)
        return error, session.stats().step, [p.detach().clone() for p in start.values()]

    (first, made, params), (second, made_too, other), _ = run_ranks(3, body)
    assert same(params, other), (first, second)
    assert made == made_too == 5
    for error in (first, second):
        assert error is None or error.sites == (2,)


def test_two_models_on_one_group_are_not_taken_for_each_other(faulty):
    """Site 0 has made more steps of the other model than site 1 was to make of this one."""

    def body(rank, group):
        models = [copy.deepcopy(MODEL), mlp(6, 9, 5)]
        optimizers = [SGD(model.parameters(), lr=0.01) for model in models]
        sessions = [distribute_then_hurry(model, group=group) for model in models]
        train(models[0], optimizers[0], rank, 5)
        train(models[1], optimizers[1], rank, 1)
        if rank == 2:
            own_comm().dies_after_vote_to = ()
        error = None
        try:
            train(models[1], optimizers[1], rank, 2)
        except (og.SiteLostError, Died) as raised:
            error = raised
        if not isinstance(error, Died):
            for session in sessions:
                session.detach()
        return error, [p.detach().clone() for p in models[1].parameters()]

    (error, params), (other_error, other), _ = run_ranks(3, body)
    assert same(params, other)
    for one in (error, other_error):
        assert (one.step, one.sites, one.may_differ) == (2, (2,), (2,))


def test_a_site_that_wakes_a_step_ahead_of_those_that_gave_it_up_is_not_certain(monkeypatch):
    """Without a board they leave at once, and nobody tells them that the step was made."""
    left = {n: at(STEP, silent=(0,), timed_out=True).text() for n in (1, 2)}
    ahead = FailureReport(STEP + 1, SESSION, gone=(1, 2), ends={SESSION: LastStep(STEP + 1, True)})
    found = found_by_site_0(ahead, left, monkeypatch)
    error = lost_error(HERE, STEP + 1, "votes", RuntimeError("closed"), found)
    assert (error.certain, error.may_differ) == (False, (1, 2))
    assert "a step before it that sites 1, 2 gave up" in str(error)
