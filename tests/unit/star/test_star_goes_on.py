"""Sites that go on where another one stays away."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_own_transport import METHODS, batch, build, gradients, loss_of
from torch.optim import SGD

import outergrad as og
from cases import relative_error
from covering import LONG
from outergrad.commit.ballot import Ballot
from stars import NAMES, Proxy, folder, hub, kit_of, on_star, star

BATCHES, LOST_IN = 7, 3
CASES = {
    **{name: METHODS[name] for name in METHODS if name != "edad"},
    "dad raw": og.DAD(always=True, reveal="activations"),
    "adaptive": og.RankDAD(rank=4, tolerance=0.1, min_ratio=1),
    "error feedback": og.RankDAD(rank=2, min_ratio=1),
    "two ways, error feedback": og.RankDAD(rank=2, min_ratio=1, reduce="two_way"),
    "sums, error feedback": og.RankDAD(rank=2, min_ratio=1, reduce="all_reduce"),
    "sides in turn": og.RankDAD(rank=2, min_ratio=1, reduce="alternate"),
    "sparse": og.Sparse(density=0.2),
    "powersgd": og.PowerSGD(rank=2),
}
EXACT = {"default", "dense", "dad", "dad forced", "dad raw"}


class Cut:
    """The line of the last site, which can be cut for good."""

    def __init__(self, server, sites, **settings):
        self.proxy = Proxy(server.port)
        ports = [None] * (sites - 1) + [self.proxy.port]
        settings = {"when_lost": "go on", **settings}
        self.stars = [star(server, rank, port, **settings) for rank, port in enumerate(ports)]

    def off(self):
        self.proxy.is_up = False
        self.proxy.cut()

    def close(self):
        self.proxy.is_up = True
        for one in self.stars:
            one.close()
        self.proxy.close()


def trained(rank, transport, method, fault=lambda step: None, lost=lambda: None, **settings):
    """Batches of one site: what was shared in each, or the error; and the model."""
    model, found = build(), []
    settings = {"timeout": 10, **settings}
    session = og.distribute(model, method, transport=transport, **settings)
    optimizer = SGD(model.parameters(), lr=0.05)
    for step in range(BATCHES):
        optimizer.zero_grad()
        try:
            fault(step)
            loss_of(model, batch(rank, step)).backward()
        except og.SiteLostError as error:
            lost()
            return [*found, error], model, session
        except og.SitesChangedError as error:
            found.append(error)
            lost()
            continue
        found.append(gradients(model))
        optimizer.step()
    session.detach()
    return found, model, session


def run(
    sites,
    method,
    *,
    lost_in=LOST_IN,
    grace_s=0.3,
    each=lambda rank: {},
    when=lambda off: off(),
    **of_star,
):
    """All sites; the last one's line is cut before its batch of this number, or `when` says."""
    with hub(sites, grace_s=grace_s) as server:
        cut = Cut(server, sites, **of_star)

        def body(rank):
            def maybe(step):
                if rank == sites - 1 and step == lost_in:
                    when(cut.off)

            told = [maybe, lambda: setattr(cut.proxy, "is_up", True)]
            return trained(rank, cut.stars[rank], method, *told, **each(rank))

        try:
            with ThreadPoolExecutor(sites) as threads:
                return list(threads.map(body, range(sites)))
        finally:
            cut.close()


QUICK = ("error feedback",)
SHOWN = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES]


def voids_of(found):
    return [step for step, one in enumerate(found) if isinstance(one, Exception)]


@pytest.mark.parametrize("name", SHOWN if LONG else [*SHOWN[:1], *QUICK])
def test_the_others_go_on_and_stay_replicas(name):
    first, second, third = run(3, CASES[name])
    (void,) = voids_of(first[0])
    assert voids_of(second[0]) == [void]
    assert void - LOST_IN in (-1, 0, 1)  # who is cut off may have one step that the others lack
    for found, _, _ in (first, second):
        error = found[void]
        assert (error.lost, error.sites, error.epoch) == (NAMES[2:3], NAMES[:2], 1)
        assert error.step == void
    assert isinstance(third[0][-1], og.SiteLostError)
    assert_alike(first, second)
    if name in EXACT:
        assert_pooled(first[0], [void], [range(3), range(2)])


def assert_alike(first, second):
    pairs = zip(first[1].parameters(), second[1].parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def assert_pooled(found, voids, epochs):
    """Each gradient is the mean over the sites of its epoch; the void steps were batches, too."""
    made = {step: one for step, one in enumerate(found) if step not in voids}
    assert_means(made, lambda step: epochs[sum(void < step for void in voids)])


def assert_means(found, left_at, **settings):
    """Each gradient is that of one process with the batches of the sites of that step."""
    model = build()
    optimizer = SGD(model.parameters(), lr=0.05, **settings)
    for step, mine in sorted(found.items()):
        left = left_at(step)
        optimizer.zero_grad()
        (sum(loss_of(model, batch(rank, step)) for rank in left) / len(left)).backward()
        wanted = gradients(model)
        assert all(relative_error(*pair) < 1e-12 for pair in zip(mine, wanted, strict=True))
        optimizer.step()


@pytest.mark.slow
def test_with_fewer_than_wanted_all_raise():
    for found, _, _ in run(3, og.DAD(), min_sites=3):
        assert isinstance(found[-1], og.SiteLostError)
        assert not any(isinstance(one, og.SitesChangedError) for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dad forced", "dense"])
def test_those_that_are_left_go_on_around_a_hub_that_must_not_read(name):
    first, second, _ = run(3, METHODS[name], blind=True)
    assert_alike(first, second)
    assert_pooled(first[0], voids_of(first[0]), [range(3), range(2)])


class Heard:
    """A tap that keeps the steps of which it was told."""

    def __init__(self):
        self.steps = set()

    def sent(self, sent):
        self.steps.add(sent.step)


def test_a_tap_hears_those_that_go_on():
    taps = [Heard() for _ in range(3)]
    run(3, og.Dense(), each=lambda rank: {"tap": taps[rank]})
    for tap in taps[:2]:
        assert tap.steps >= {*range(BATCHES - 1)}


class Told:
    """A recorder that keeps all."""

    def __init__(self):
        self.events = []

    def record(self, event):
        self.events.append(event)


def test_who_took_part_stands_in_every_record():
    """In each step's event, in an event of the change, and in the hub's log: in every step."""
    recorders = [Told() for _ in range(3)]
    before = lines_of_log()
    first, _, _ = run(3, og.DAD(), each=lambda rank: {"recorder": recorders[rank]})
    (void,) = voids_of(first[0])
    for events in (recorders[0].events, recorders[1].events):
        took_part = {e.step: e.took_part for e in events if isinstance(e, og.events.Step)}
        assert took_part == {k: NAMES[: 3 if k < void else 2] for k in range(BATCHES - 1)}
        (change,) = [e for e in events if isinstance(e, og.events.Change)]
        assert (change.step, change.epoch, change.lost, change.back) == (void, 1, NAMES[2:3], ())
        assert list(change.why or {}) == [NAMES[2]]
    for rank, recorder in enumerate(recorders):
        (begun,) = [e for e in recorder.events if isinstance(e, og.events.Run)]
        assert (begun.name, begun.took_part) == (NAMES[rank], NAMES[:3])
        assert "over mutual TLS; the hub could read" in begun.transport
    lines = lines_of_log()[len(before) :]
    (change,) = [line for line in lines if line["what"] == "epoch"]
    assert (change["sites"], change["without"]) == (list(NAMES[:2]), [NAMES[2]])
    assert sites_in(lines) == {k: list(NAMES[: 3 if k < void else 2]) for k in range(BATCHES - 1)}


def sites_in(lines):
    """Of each step in the log; the same in all its lines."""
    found = {}
    for line in lines:
        if line["what"] == "step":
            steps = range(line["first"], line["step"] + 1)
            assert not found.keys() & {k for k in steps if found.get(k) != line["sites"]}
            found.update(dict.fromkeys(steps, line["sites"]))
    return found


def test_a_step_that_is_void_for_want_of_a_vote_is_not_in_the_log(monkeypatch):
    """Where sites wait for votes: all have everything of the step, but the last one's vote."""
    cast, before = Ballot.cast, lines_of_log()

    def before_its_vote(off):
        def cut_then_cast(ballot, *args):
            if ballot._vote.rank == 2:
                off()
            cast(ballot, *args)

        monkeypatch.setattr(Ballot, "cast", cut_then_cast)

    first, _, _ = run(3, CASES["powersgd"], when=before_its_vote)
    assert voids_of(first[0]) == [LOST_IN]
    found = sites_in(lines_of_log()[len(before) :])
    assert found == {k: list(NAMES[: 3 if k < LOST_IN else 2]) for k in range(BATCHES - 1)}


def lines_of_log():
    """Unchecked: other tests have two hubs at once write to it."""
    file = folder().log_file
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(json.loads(line)["line"]) for line in lines]


def copied(name):
    """A kit elsewhere, as if of another process: this one would share its line."""
    return shutil.copy(kit_of(name), tempfile.mkdtemp(prefix="outergrad-kit-"))


def come_back(sites, method, *, comes=lambda goes, again: goes(2, again), **of_star):
    """The last site is lost; a new process of it calls, and is taken in."""
    with hub(sites, grace_s=0.3) as server:
        cut, back = Cut(server, sites, **of_star), threading.Event()
        again = star(server, sites - 1, kit=copied(NAMES[sites - 1]), when_lost="go on", **of_star)

        def goes(rank, transport, *told):
            model, found = build(), {}
            session = og.distribute(model, method, transport=transport, timeout=10)
            optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
            while (step := session.stats().step) < 60:
                optimizer.zero_grad()
                try:
                    for one in told:
                        one(step, session)
                    loss_of(model, batch(rank, step)).backward()
                except og.SiteLostError as error:
                    return {**found, "lost": error}, model
                except og.SitesChangedError as error:
                    found.setdefault("changed", []).append(error)
                    cut.proxy.is_up = True
                    back.set()
                    continue
                found[step] = gradients(model)
                optimizer.step()
            session.detach()
            return found, model

        def slowly(step, session):
            time.sleep(0.04 if session._at.comm.epoch == 1 else 0.0)

        def maybe_cut(step, session):
            if step == LOST_IN:
                cut.off()

        def body(rank):
            if rank == sites:
                back.wait()
                return comes(goes, again)
            told = maybe_cut if rank == sites - 1 else slowly
            return goes(rank, cut.stars[rank], told)

        try:
            with ThreadPoolExecutor(sites + 1) as threads:
                return list(threads.map(body, range(sites + 1)))
        finally:
            again.close()
            cut.close()


@pytest.mark.parametrize("name", SHOWN if LONG else ["dad forced"])
def test_a_site_comes_back(name):
    first, second, _, again = come_back(3, CASES[name])
    assert set(first[0]) == set(second[0])
    back = min(step for step in again[0])
    assert LOST_IN < back < 60
    for found, _ in (first, second, again):
        assert set(range(back, 60)) <= found.keys()
        pairs = [zip(found[k], first[0][k], strict=True) for k in range(back, 60)]
        assert all(torch.equal(*pair) for of_step in pairs for pair in of_step)
    assert_alike((0, first[1]), (0, second[1]))
    assert_alike((0, first[1]), (0, again[1]))
    (changed,) = first[0].pop("changed")
    if name in EXACT:
        alone = range(changed.step, back)
        assert_means(first[0], lambda k: range(2 if k in alone else 3), momentum=0.9)


@pytest.mark.slow
def test_a_site_that_keeps_the_others_waiting_is_lost():
    def late(step):
        time.sleep(5.0 if step == LOST_IN else 0.0)

    def body(rank, one):
        return trained(rank, one, og.DAD(), late if rank == 2 else lambda step: None, timeout=1.5)

    first, second, third = on_star(3, body, {"when_lost": "go on"})
    assert voids_of(first[0]) == voids_of(second[0]) == [LOST_IN]
    assert first[0][LOST_IN].lost == NAMES[2:3]
    assert isinstance(third[0][-1], og.SiteLostError)
    assert_alike(first, second)


@pytest.mark.slow
def test_one_after_the_other():
    """Of four sites two are left; each loss costs one step."""
    with hub(4, grace_s=0.3) as server:
        proxies = [Proxy(server.port) for _ in range(2)]
        ports = [proxies[0].port, None, None, proxies[1].port]
        stars = [star(server, k, port, when_lost="go on") for k, port in enumerate(ports)]
        lost_in = {0: 4, 3: 1}

        def body(rank):
            def fault(step):
                if step == lost_in.get(rank):
                    proxies[rank // 3].is_up = False
                    proxies[rank // 3].cut()

            return trained(rank, stars[rank], og.DAD(always=True), fault, timeout=4)

        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(body, range(4)))
        for one in (*proxies, *stars):
            one.close()
    first, second = found[1:3]
    voids = voids_of(first[0])
    assert voids_of(second[0]) == voids
    assert [first[0][k].lost for k in voids] == [NAMES[3:], NAMES[:1]]
    assert [first[0][k].epoch for k in voids] == [1, 2]
    assert_alike(first, second)
    assert_pooled(first[0], voids, [range(4), range(3), range(1, 3)])


def test_what_is_saved_when_a_site_is_lost_is_saved_and_the_next_step_says_so():
    """A site that settles alone finds the loss: its loop hears of it in the step of the others."""

    def body(rank, one):
        model = build()
        session = og.distribute(model, og.DAD(always=True), transport=one, timeout=10)
        optimizer, told = SGD(model.parameters(), lr=0.05), []
        for step in range(4):
            if rank == 2 and step == 2:
                session.detach()
                one.close()
                return None, model
            if rank == 0 and step == 2:
                time.sleep(0.3)
                assert session.state_dict()["step"] == 2
            optimizer.zero_grad()
            try:
                loss_of(model, batch(rank, step)).backward()
                optimizer.step()
            except og.SitesChangedError as error:
                told.append((step, error.step))
        assert session.stats().step == 3
        session.detach()
        return told, model

    first, second, _ = on_star(3, body, {"when_lost": "go on"})
    assert first[0] == second[0] == [(2, 2)]
    assert_alike((0, first[1]), (0, second[1]))


def test_what_cannot_go_on_is_refused():
    def body(rank, one):
        for method in (og.Auto(), og.LocalSteps(2), og.DAD(every=2)):
            with pytest.raises(ValueError, match="when_lost='go on'"):
                og.distribute(build(), method, transport=one)

    on_star(2, body, {"when_lost": "go on"})
    for settings in ({"when_lost": "wait"}, {"min_sites": 0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            og.Star("localhost:1", kit="none", **settings)


ALONE = pytest.mark.filterwarnings("ignore:og.Star. min_sites=1")


def test_a_site_that_may_be_left_alone_is_warned():
    with pytest.warns(UserWarning, match="left alone goes on, and learns from its own data alone"):
        og.Star("localhost:1", kit="none", when_lost="go on", min_sites=1)


@ALONE
@pytest.mark.parametrize("name", ["dad forced", "dense", "dad raw"])
def test_one_of_two_goes_on_alone_where_that_is_asked_for(name):
    (found, model, session), _ = run(2, CASES[name], min_sites=1)
    changed = [one for one in found if isinstance(one, og.SitesChangedError)]
    assert [(one.lost, one.sites) for one in changed] == [(NAMES[1:2], NAMES[:1])]
    assert session.stats().step == BATCHES - 1 == len(found) - 1
    alone = build()
    optimizer = SGD(alone.parameters(), lr=0.05)
    for step, shared in enumerate(found):
        optimizer.zero_grad()
        if shared is changed[0]:
            continue
        loss_of(alone, batch(0, step)).backward()
        if step > found.index(changed[0]):
            assert all(
                relative_error(*pair) < 1e-9 for pair in zip(gradients(alone), shared, strict=True)
            )
        for param, gradient in zip(alone.parameters(), shared, strict=True):
            param.grad = gradient.clone()
        optimizer.step()
    assert_alike((0, alone), (0, model))


@ALONE
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dad forced", "dense", "error feedback"])
def test_the_other_of_two_comes_back_to_the_one_that_went_on_alone(name):
    (first, model), _, (again, same) = come_back(2, CASES[name], min_sites=1, comes=second_of_two)
    back = min(again)
    assert LOST_IN < back < 60
    assert set(range(back, 60)) <= first.keys() & again.keys()
    for step in range(back, 60):
        assert all(map(torch.equal, first[step], again[step]))
    assert_alike((0, model), (0, same))


def second_of_two(goes, again):
    return goes(1, again)


@pytest.mark.slow
def test_one_that_comes_with_another_method_raises_and_the_others_go_on():
    def comes(goes, again):
        with pytest.raises(ValueError, match="do not agree: site-c has 'method: Dense"):
            og.distribute(build(), og.Dense(), transport=again, timeout=10)
        again.close()

    first, second, _, _ = come_back(3, og.DAD(always=True), comes=comes)
    assert [error.epoch for error in first[0]["changed"]] == [1, 3]
    assert set(first[0]) == set(second[0]) == {*range(60), "changed"}
    assert_alike((0, first[1]), (0, second[1]))


@pytest.mark.slow
def test_checkpoints_are_made_anew_by_those_that_go_on(tmp_path):
    def body(rank, one):
        model = build()
        session = og.distribute(model, og.RankDAD(rank=2, min_ratio=1), transport=one, timeout=10)
        optimizer = SGD(model.parameters(), lr=0.05)
        for step in range(4):
            if rank == 2 and step == 2:
                session.detach()
                one.close()
                return None
            optimizer.zero_grad()
            try:
                loss_of(model, batch(rank, step)).backward()
                optimizer.step()
            except og.SitesChangedError:
                checkpoints = og.Checkpoints(tmp_path, session, model=model, optimizer=optimizer)
                checkpoints.save(step)
        assert checkpoints.restore().step == 2
        session.detach()
        return session.stats().step

    assert on_star(3, body, {"when_lost": "go on"}) == [2, 2, None]
