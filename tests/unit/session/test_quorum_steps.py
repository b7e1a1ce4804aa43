"""Exchanges that go ahead with a quorum: who is late joins a later one, and nothing is lost."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import nn

import outergrad as og
from cases import relative_error
from outergrad import events
from ranks import run_on_lasting_groups, run_ranks
from sites_apart import FULL_RANK, INNER, LOW_RANK, Site, model, nesterov, plain, train
from stars import on_star

K, SITES, LATE = 2, 3, 2
GRACE_S, LONG_S = 0.2, 60.0
STEPS = 10


class Exchanges:
    """Keeps what is told of exchanges, with this site's number of steps, and tells of each."""

    every, budget, samples = 1, 1.0, False

    def __init__(self, told=None):
        self.all, self.at, self.made, self.shared = [], [], lambda: 0, []
        self._told = {} if told is None else told
        self.start = list

    def record(self, event):
        if isinstance(event, events.Exchange):
            self.all.append(event)
            self.at.append(self.made())
            self.shared.append([p.detach().clone() for p in self.start()])
            if event.number in self._told:
                self._told[event.number].set()


def joined(
    rank, connect, told=None, inner="sgd", outer=plain, method=None, grace=GRACE_S, k=K, **more
):
    """A site that counts its steps, and its recorder."""
    exchanges = Exchanges(told if rank == 0 else None)
    own = {"outer": outer, "quorum": 2, "grace": grace, "method": method or og.Dense()}
    site = Site(og.LocalSteps(k, **own), rank, inner=inner, recorder=exchanges, **connect, **more)
    site.made = 0
    exchanges.made = lambda: site.made
    exchanges.start = lambda: site.session._updates.outer.start.values()
    return site, exchanges


def go(site, start, stop):
    """Makes steps one by one, which are counted as they begin."""
    for number in range(start, stop):
        site.made = number + 1
        site.steps(number, number + 1)


def trained(rank, connect, told, waits, **settings):
    """A whole training; `waits` says of what a site waits before some of its steps."""
    site, exchanges = joined(rank, connect, told, **settings)
    for number in range(STEPS):
        if rank == LATE and number in waits:
            assert told[waits[number]].wait(30)
        go(site, number, number + 1)
    site.session.flush()
    stats, weights = site.session.stats(), site.weights()
    site.session.detach()
    return exchanges, stats, weights


def on_groups(body, sites=SITES):
    return run_on_lasting_groups(sites, lambda rank, group: body(rank, {"group": group}))


def on_new_groups(body, sites=SITES):
    return run_ranks(sites, lambda rank, group: body(rank, {"group": group}))


def around_a_hub(body, sites=SITES):
    return on_star(sites, lambda rank, star: body(rank, {"group": None, "transport": star}))


PLACES = {"groups": on_groups, "star": around_a_hub}
WAITS = {
    "once": {3: 1},
    "by two exchanges": {3: 2},
    "always": {1: 0, 3: 1, 5: 2, 7: 3, 9: 4},
}
"""Before which of its steps the late site waits until which exchange is over."""


def late(place, waits, **settings):
    told = {number: threading.Event() for number in waits.values()}
    return PLACES[place](lambda rank, connect: trained(rank, connect, told, waits, **settings))


def reference(found, inner="sgd", outer=plain, samples=False):
    """In float64, by the definition: the weights after the exchanges that took place."""
    start = model().double()
    replicas = [copy.deepcopy(start) for _ in found]
    optimizers = [INNER[inner](replica.parameters()) for replica in replicas]
    outer_optimizer, done, weights = outer(start.parameters()), [0] * len(found), [0] * len(found)
    for number, event in enumerate(found[0].all):
        for rank, replica in enumerate(replicas):
            steps = range(done[rank], found[rank].at[number])
            train(replica, [optimizers[rank]], rank, steps)
            done[rank] = steps.stop
            weights[rank] += (4 + rank if samples else 1) * len(steps)
        members = [rank for rank in range(len(found)) if f"site {rank}" in event.took_part]
        counts = {r: weights[r] if samples else 1 for r in members}
        before = copy.deepcopy(start)
        for p, *now in zip(start.parameters(), *(r.parameters() for r in replicas), strict=True):
            p.grad = sum(n * (p.detach() - now[r].detach()) for r, n in counts.items())
            p.grad /= sum(counts.values())
        outer_optimizer.step()
        for rank, replica in enumerate(replicas):
            own = zip(replica.parameters(), start.parameters(), before.parameters(), strict=True)
            with torch.no_grad():
                for q, p, was in own:
                    q.copy_(p if rank in members else q + p - was)
            weights[rank] = 0 if rank in members else weights[rank]
    return start


def in_numbers(exchanges):
    """The same, with sites by number where a hub calls them by name."""
    names = sorted({name for event in exchanges.all for name in (*event.took_part, *event.late)})
    of = {name: f"site {rank}" for rank, name in enumerate(names)}
    exchanges.all = [
        replace(
            event,
            took_part=tuple(of[name] for name in event.took_part),
            late=tuple(of[name] for name in event.late),
        )
        for event in exchanges.all
    ]
    return exchanges


def checked(results):
    """All sites know of the same exchanges, share the same after each, and end as is right."""
    found = [in_numbers(exchanges) for exchanges, _, _ in results]
    rolls = [[(e.number, e.took_part, e.late) for e in one.all] for one in found]
    assert rolls[0] == rolls[1] == rolls[2]
    for one in found[1:]:
        for ours, theirs in zip(found[0].shared, one.shared, strict=True):
            assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))
    for _, stats, weights in results:
        assert stats.exchanges == found[0].all[-1].number + 1
        assert len(stats.took_part) + len(found[0].all[-1].late) == SITES
        assert all(a.equal(b) for a, b in zip(weights, results[0][2], strict=True))
    return found


def assert_right(results, **about):
    found = checked(results)
    expected = reference(found, **about)
    for p, q in zip(results[0][2], expected.parameters(), strict=True):
        assert relative_error(p, q.detach()) < 1e-5
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", WAITS)
def test_who_is_late_is_left_out_and_rejoins_with_what_it_owes(name, place):
    found = assert_right(late(place, WAITS[name]))
    lates = [e.number for e in found[0].all if e.late]
    assert lates, "somebody was late"
    assert all(e.late == (f"site {LATE}",) for e in found[0].all if e.late)
    assert not found[0].all[-1].late


@pytest.mark.parametrize(("inner", "outer"), [("momentum", nesterov), ("adam", plain)])
def test_with_momentum_outside_and_other_optimizers_inside(inner, outer):
    how = {"inner": inner, "outer": outer}
    assert_right(late("groups", WAITS["by two exchanges"], **how), **how)


def test_late_sites_count_by_all_the_samples_that_they_owe():
    results = late("groups", WAITS["once"], weighting="samples")
    assert_right(results, samples=True)


@pytest.mark.parametrize("name", FULL_RANK)
def test_every_method_of_full_rank_brings_the_whole_change(name):
    assert_right(late("groups", WAITS["once"], method=FULL_RANK[name]))


@pytest.mark.parametrize("name", LOW_RANK)
def test_methods_of_low_rank_leave_all_sites_equal(name):
    found = checked(late("groups", WAITS["once"], method=LOW_RANK[name]))
    assert any(e.late for e in found[0].all)


@pytest.mark.parametrize("name", [*LOW_RANK, "dense"])
def test_if_nobody_is_late_it_is_as_without(name):
    method = LOW_RANK.get(name, og.Dense())

    def body(rank, connect):
        site, exchanges = joined(rank, connect, method=method, grace=LONG_S, outer=nesterov)
        go(site, 0, 7)
        site.session.flush()
        site.session.detach()
        usual = Site(og.LocalSteps(K, outer=nesterov, method=method), rank, **connect)
        usual.steps(0, 7).session.flush()
        usual.session.detach()
        assert all(a.equal(b) for a, b in zip(site.weights(), usual.weights(), strict=True))
        assert not any(event.late for event in exchanges.all)
        assert len(exchanges.all) == 4

    on_groups(body)


def test_what_was_applied_and_what_is_owed_are_all_local_changes():
    """With a rate of 1 outside, and plain SGD inside, whose changes are its gradients."""
    told = {0: threading.Event()}

    def body(rank, connect):
        site, exchanges = joined(rank, connect, told)
        before, own = [p.clone() for p in exchanges.start()], None
        for number in range(3 if rank == LATE else 5):
            if rank == LATE and number == 1:
                assert told[0].wait(30)
            go(site, number, number + 1)
            grads = [0.1 * p.grad for p in site.model.parameters()]
            own = grads if own is None else [a + b for a, b in zip(own, grads, strict=True)]
        shared = [before, *exchanges.shared]
        pairs = zip(exchanges.start(), site.model.parameters(), strict=True)
        owed = [(p - q).detach().clone() for p, q in pairs]
        site.session.release()
        return own, owed, shared, exchanges.all

    results = on_new_groups(body)
    counts = [len(event.took_part) for event in results[0][3]]
    assert 2 in counts
    most = max(results, key=lambda found: len(found[2]))[2]
    for index in range(len(most[0])):
        pairs = itertools.pairwise(most)
        moved = [was[index] - now[index] for was, now in pairs]
        applied = sum(n * change for n, change in zip(counts, moved, strict=True))
        owed = sum(found[1][index] for found in results)
        local = sum(found[0][index] for found in results)
        torch.testing.assert_close(applied + owed, local, rtol=1e-5, atol=1e-6)


def test_late_and_present_sites_say_so_in_the_log(caplog):
    with caplog.at_level(logging.WARNING, logger="outergrad"):
        late("groups", WAITS["once"])
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert "site 2 was late: sites 0, 1 went ahead with exchange 1 without it" in told
    assert "sites 0, 1 went ahead with exchange 1 without site 2, late by more than 0.2 s" in told


def test_a_late_site_is_in_time_again_before_its_own_steps_are_over():
    """It joins as soon as another site has come, whatever number of steps it has made."""
    told, is_open = {0: threading.Event()}, threading.Event()

    def body(rank, connect):
        site, exchanges = joined(rank, connect, told, grace=5.0, k=50)
        if rank == LATE:
            go(site, 0, 49)
            assert told[0].wait(30)
            go(site, 49, 50)  # late
            assert is_open.wait(30)
            while len(exchanges.all) < 2:
                go(site, site.made, site.made + 1)
                time.sleep(0.1)  # its steps take longer than a look at the board
        else:
            go(site, 0, 99)
            is_open.set()
            go(site, 99, 100)
        site.session.release()
        return exchanges.all, exchanges.at

    results = on_new_groups(body)
    assert [len(event.took_part) for event in results[0][0]] == [2, 3]
    assert results[LATE][1][1] < 100


@pytest.mark.parametrize("place", PLACES)
def test_a_quorum_that_never_comes_is_an_error_that_names_who_is_missing(place):
    over = threading.Barrier(SITES, timeout=30)

    def body(rank, connect):
        method, more = og.LocalSteps(K, quorum=3, grace=0), {"timeout": timedelta(seconds=2)}
        site, error = Site(method, rank, **connect, **more), None
        try:
            if rank != LATE:
                site.steps(0, 2)
        except og.SiteLostError as raised:
            error = raised
        over.wait()
        site.session.release()
        return (error,)

    run = around_a_hub if place == "star" else on_new_groups
    for (error,) in run(body)[:LATE]:
        assert error.sites == (LATE,)
        assert "a quorum of 3 of 3 sites" in str(error)
        assert ("site-c" if place == "star" else "site 2") in str(error)


def test_flush_names_a_site_that_never_came_back():
    """The others went ahead without it until then."""

    def body(rank, connect):
        method, more = og.LocalSteps(K, quorum=2, grace=0.1), {"timeout": timedelta(seconds=2)}
        site, error = Site(method, rank, **connect, **more), None
        try:
            if rank != LATE:
                site.steps(0, 4)
                site.session.flush()
        except og.SiteLostError as raised:
            error = raised
        over.wait()
        stats = site.session.stats()
        site.session.release()
        return error, stats

    over = threading.Barrier(SITES, timeout=60)
    for error, stats in on_new_groups(body)[:LATE]:
        assert error.sites == (LATE,)
        assert "while it waited for all sites, so that they are equal" in str(error)
        assert (stats.exchanges, stats.took_part) == (2, ("site 0", "site 1"))


@pytest.mark.parametrize("name", ["dense", "rank-dad"])
def test_training_goes_on_from_a_state_that_was_saved_while_one_was_late(name):
    """Saving brings all to the same exchange; who was late keeps what it owes."""
    method, told = LOW_RANK.get(name, og.Dense()), {0: threading.Event()}

    def body(rank, connect):
        site, before = joined(rank, connect, told, method=method, outer=nesterov)
        go(site, 0, 1)
        if rank == LATE:
            assert told[0].wait(30)
        go(site, 1, 3)
        file = io.BytesIO()
        parts = (site.session, site.model, site.optimizer)
        torch.save([part.state_dict() for part in parts], file)
        site.session.detach()
        again, after = joined(rank, connect, method=method, outer=nesterov)
        again.made = 3
        file.seek(0)
        states = torch.load(file, weights_only=True)
        for part, state in zip((again.session, again.model, again.optimizer), states, strict=True):
            part.load_state_dict(state)
        go(again, 3, 6)
        again.session.flush()
        weights, stats = again.weights(), again.session.stats()
        again.session.detach()
        before.all += after.all
        before.at += after.at
        before.shared += after.shared
        return before, stats, weights

    results = on_groups(body)
    found = [in_numbers(exchanges) for exchanges, _, _ in results]
    assert [e.took_part for e in found[0].all] == [e.took_part for e in found[LATE].all]
    for _, _, weights in results:
        assert all(a.equal(b) for a, b in zip(weights, results[0][2], strict=True))
    if name == "dense":
        expected = reference(found, outer=nesterov)
        for p, q in zip(results[0][2], expected.parameters(), strict=True):
            assert relative_error(p, q.detach()) < 1e-5


def test_an_exchange_on_the_board_sends_a_change_once_and_reads_those_of_the_others():
    told = {0: threading.Event()}

    def body(rank, connect):
        site, exchanges = joined(rank, connect, told)
        if rank == LATE:
            assert told[0].wait(30)
        go(site, 0, 2)
        stats, lines = site.session.stats(), site.session.coverage()
        site.session.release()
        return stats, lines, exchanges.all[0].late

    whole = sum(p.nbytes for p in model().parameters())
    for rank, (stats, lines, late_ones) in enumerate(on_new_groups(body)):
        assert late_ones == ("site 2",)
        assert (stats.step, stats.exchanges, stats.took_part) == (0, 1, ("site 0", "site 1"))
        assert stats.sent_bytes == (0 if rank == LATE else whole)
        assert stats.received_bytes == (2 if rank == LATE else 1) * whole
        assert {line.reveals for line in lines} == {"this site's change"}
        assert all("whole where a site is late" in line.why for line in lines)


class Heard:
    """A tap that keeps whole changes."""

    def __init__(self):
        self.kept = {}

    def sent(self, sent):
        self.kept[sent.name] = sent.content.detach().clone(), sent.way


def test_what_is_put_on_the_board_is_told_to_a_tap():
    told = {0: threading.Event()}

    def body(rank, connect):
        tap = Heard()
        site, _ = joined(rank, connect, told, tap=tap)
        before = site.weights()
        if rank == LATE:
            assert told[0].wait(30)
        go(site, 0, 2)
        site.session.release()
        return tap.kept, before

    for rank, (kept, before) in enumerate(on_new_groups(body)):
        replica = copy.deepcopy(model())
        train(replica, [INNER["sgd"](replica.parameters())], rank, range(2))
        for (name, p), start in zip(replica.named_parameters(), before, strict=True):
            if rank == LATE:
                assert name not in kept
                continue
            change, way = kept[name]
            assert way.value == "gathered"
            torch.testing.assert_close(change, start - p.detach())


def test_changes_do_not_stay_on_the_board_once_all_sites_have_applied_them():
    told = {0: threading.Event()}

    def body(rank, connect):
        site, _ = joined(rank, connect, told)
        if rank == LATE:
            assert told[0].wait(30)
        go(site, 0, 2)
        changes = site.session._updates._quorum._changes
        own = list(changes._own)
        site.session.flush()
        left = changes._gathering.board.get(changes._slot(0, rank))
        site.session.detach()
        return own, left, list(changes._own)

    assert on_new_groups(body) == [([0], None, [])] * 2 + [([], None, [])]


def test_replicas_that_are_compared_after_every_exchange_have_not_drifted():
    assert_right(late("groups", WAITS["by two exchanges"], verify_every=1))


def test_running_statistics_are_equal_after_the_next_exchange_of_all():
    told = {0: threading.Event()}

    def body(rank, connect):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        recorder = Exchanges(told if rank == 0 else None)
        method = og.LocalSteps(K, quorum=2, grace=GRACE_S)
        session = og.distribute(net, method, recorder=recorder, **connect)
        optimizer, statistics = INNER["sgd"](net.parameters()), []
        for number in range(K):
            if rank == LATE and number:
                assert told[0].wait(30)
            train(net, [optimizer], rank, [number])
        statistics.append(net[1].running_mean.clone())
        session.flush()
        statistics.append(net[1].running_mean.clone())
        session.detach()
        return [event.late for event in recorder.all], statistics

    (lates, first), *others = on_new_groups(body)
    assert lates == [("site 2",), ()]
    for _, (apart, equal) in others:
        assert not apart.equal(first[0])
        assert equal.equal(first[1])


def test_a_whole_flush_is_refused():
    def body(rank, group):
        site = Site(og.LocalSteps(K, quorum=2, grace=GRACE_S), rank, group)
        with pytest.raises(ValueError, match=r"flush\(whole=True\) does not go with quorum="):
            site.session.flush(whole=True)
        site.session.detach()

    run_ranks(2, body)
