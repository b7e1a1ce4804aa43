"""What a session tells of its privacy is what dp-accounting says of all that it has sent."""

from __future__ import annotations

import copy
import json
import math
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import outergrad as og
from cases import Boom, mlp
from outergrad.core import packages
from outergrad.private import Ledger, Poisson, Release, Run
from ranks import run_on_lasting_groups
from stars import NAMES, Proxy, goes_on_without_the_last, hub, kit_of, on_star_with_a_line, star

dp = pytest.importorskip("dp_accounting", reason="pip install 'dp-accounting>=0.6'")
DELTA, NOISE, RATE = 1e-5, 1.1, 0.01
MODEL = mlp(6, 7, 5)


def private_of(ledger, **about):
    settings = {"clip": 1.0, "noise": NOISE, "batch": 6, "sampling": Poisson(RATE)}
    return og.Private(**(settings | about), ledger=ledger)


def make_step(model, rows=3):
    model.zero_grad()
    model(torch.randn(rows, 6)).square().mean().backward()


# -- a training with all that may happen ----------------------------------------------------------


class Training:
    """One site around a hub, of which the last one is lost in the end."""

    def __init__(self, rank, transport, folder):
        self.rank = rank
        self.ledger = Ledger(DELTA, accountant="rdp", file=folder / f"ledger-{rank}.json")
        self.model = copy.deepcopy(MODEL)
        self.session = og.distribute(
            self.model,
            og.Dense(),
            transport=transport,
            transform=private_of(self.ledger),
            timeout=10,
        )
        about = {"model": self.model, "ledger": self.ledger}
        self.checkpoints = og.Checkpoints(folder / f"of-{rank}", self.session, **about)

    def steps(self, count):
        for _ in range(count):
            make_step(self.model)

    def passes(self):
        with self.session.no_sync():
            make_step(self.model)
        self.model(torch.randn(3, 6)).square().mean().backward()

    def discarded(self):
        """A step in which the backward of site 1 raises."""
        self.model.zero_grad()
        loss = self.model(torch.randn(3, 6)).square().mean()
        error = ArithmeticError if self.rank == 1 else og.StepDiscardedError
        with pytest.raises(error):
            Boom.apply(loss, self.rank == 1).backward()
        self.model.zero_grad()


@pytest.mark.parametrize("blind", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_epsilon_is_dp_accountings_over_all_that_may_happen(tmp_path, blind):
    """Passes, a discarded step, a lost site; then a resume from a checkpoint before these."""

    def first(rank, transport, line):
        site = Training(rank, transport, tmp_path)
        site.steps(3)
        site.passes()
        site.checkpoints.save(4)
        site.discarded()
        site.steps(2)
        goes_on = goes_on_without_the_last(site.steps, rank == 2, line, further=4)
        return site.ledger.runs if goes_on else None

    def again(rank, transport, _):
        site = Training(rank, transport, tmp_path)
        before = site.ledger.steps
        site.checkpoints.restore(allow_lost=True)
        site.steps(2)
        told = site.session.privacy()
        site.session.detach()
        return before, site.ledger.runs, told

    sums = "masked" if blind else "trusted"
    of_three = Release(NOISE, Poisson(RATE), sites=3, sums=sums)
    shown = Release(NOISE, Poisson(RATE), sites=3, sums="open")
    of_two = Release(NOISE, Poisson(RATE), sites=2, sums=sums)
    one, other, _ = on_star_with_a_line(3, first, blind=blind)
    assert one[:-2] == other[:-2] == (Run(of_three, 5), Run(shown, 1))
    for runs in (one, other):
        assert runs[-1] == Run(of_two, 4)
        assert runs[-2].release == of_three
        assert runs[-2].steps in (2, 3)  # the void step, on a site that had begun it
    lost = max(one[-2].steps, other[-2].steps)
    for before, runs, told in on_star_with_a_line(2, again, blind=blind):
        assert before in (12 + 1, 11 + 1)
        assert runs == (
            Run(of_three, 5),
            Run(shown, 1),
            Run(of_three, lost),
            Run(of_two, 6),
        )
        assert told.steps == 12 + lost
        noises = {
            "model": [(NOISE, 12 + lost)],
            "site": [
                (NOISE * math.sqrt(2 / 3), 5 + lost),
                (NOISE / math.sqrt(3), 1),
                (NOISE / math.sqrt(2), 6),
            ],
            "hub": [(NOISE, 11 + lost), (NOISE / math.sqrt(3), 1)]
            if blind
            else [(NOISE / math.sqrt(3), 6 + lost), (NOISE / math.sqrt(2), 6)],
        }
        for observer, events in noises.items():
            assert told.epsilon[observer] == pytest.approx(by_hand(events), abs=1e-9)


def by_hand(noises):
    accountant = dp.rdp.RdpAccountant()
    for noise, steps in noises:
        accountant.compose(dp.PoissonSampledDpEvent(RATE, dp.GaussianDpEvent(noise)), steps)
    return accountant.get_epsilon(DELTA)


def test_a_site_that_comes_back_counts_what_the_others_have_counted():
    """With a ledger that has nothing: it is a new process of a machine that has lost its disk."""
    back = threading.Event()

    def body(rank, transport, line, own_steps=60):
        ledger = Ledger(DELTA, accountant="rdp")
        model = copy.deepcopy(MODEL)
        about = {"transform": private_of(ledger), "timeout": 10}
        session = og.distribute(model, og.Dense(), transport=transport, **about)
        while (step := session.stats().step) < own_steps:
            if line is not None and rank == 2 and step == 3:
                line(False)
            elif session._at.comm.epoch == 1:  # until the third is back
                time.sleep(0.04)
            try:
                make_step(model)
            except og.SitesChangedError:
                line(True) if line is not None else None
                back.set()
            except og.SiteLostError:
                return None
        session.detach()
        return ledger.runs

    with hub(3, grace_s=0.3) as server, ThreadPoolExecutor(4) as threads:
        proxy = Proxy(server.port)

        def line(is_up):
            proxy.is_up = is_up
            if not is_up:
                proxy.cut()

        kit = shutil.copy(kit_of(NAMES[2]), tempfile.mkdtemp(prefix="outergrad-kit-"))
        ports = [None, None, proxy.port]
        stars = [star(server, rank, port, when_lost="go on") for rank, port in enumerate(ports)]
        again = star(server, 2, kit=kit, when_lost="go on")

        def comes():
            back.wait()
            return body(2, again, None)

        try:
            others = [threads.submit(body, rank, stars[rank], line) for rank in range(3)]
            late = threads.submit(comes)
            one, other, none = (future.result() for future in others)
            assert none is None
            assert one == other == late.result()
            assert [(run.release.sites, run.release.sums) for run in one] == [
                (3, "trusted"),
                (2, "trusted"),
                (3, "trusted"),
            ]
            assert sum(run.steps for run in one) in (60, 61, 62)  # and void steps
        finally:
            for each in (*stars, again):
                each.close()
            proxy.close()


# -- what it tells --------------------------------------------------------------------------------


def told_of(group, ledger, **about):
    """A session's report after three steps, and the ledger."""
    model = copy.deepcopy(MODEL)
    method = about.pop("method", og.Dense())
    private = private_of(ledger, **about)
    session = og.distribute(model, method, group=group, transform=private)
    for _ in range(3):
        make_step(model)
    try:
        return session.privacy(), session.stats()
    finally:
        session.detach()


def test_a_session_tells_what_its_ledger_does():
    def body(rank, group):
        ledger = Ledger(DELTA)
        told, stats = told_of(group, ledger)
        ledger.record(Release(NOISE, Poisson(RATE)), 100)  # what was told stays as it was
        return told, stats

    ledger = Ledger(DELTA)
    ledger.record(Release(NOISE, Poisson(RATE), sites=2, sums="open"), 3)
    for told, stats in run_on_lasting_groups(2, body):
        assert (told.steps, told.delta, told.notes) == (3, DELTA, ())
        assert stats.private_steps == 3
        assert dict(told.epsilon) == {who: ledger.epsilon(who) for who in ("model", "site", "hub")}
        assert str(told) == str(ledger)


def test_it_says_what_is_not_covered():
    def body(rank, group):
        method = og.PerLayer({"0.*": og.Local(), "*": og.Dense()})
        return told_of(group, Ledger(DELTA, accountant="rdp"), noise=0, method=method)[0]

    for told in run_on_lasting_groups(2, body):
        assert told.epsilon["model"] == math.inf
        assert "noise=0: gradients are clipped alone, and nothing is promised" in str(told)
        assert "not covered: 0.weight, 0.bias, trained at this site alone" in str(told)


def test_without_dp_accounting_it_tells_the_steps_and_how_to_install(monkeypatch):
    is_installed = packages.is_installed
    monkeypatch.setattr(
        packages, "is_installed", lambda name: name != "dp_accounting" and is_installed(name)
    )

    def body(rank, group):
        return told_of(group, Ledger(DELTA))[0]

    for told in run_on_lasting_groups(2, body):
        assert (dict(told.epsilon), told.steps) == ({}, 3)
        assert "3 released steps" in str(told)
        assert "pip install 'dp-accounting>=0.6'" in str(told)


@pytest.mark.parametrize("transform", [None, og.Private(clip=1.0, noise=1.0, batch=6)])
def test_without_a_ledger_it_says_what_to_pass(transform):
    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, og.Dense(), group=group, transform=transform)
        with pytest.raises(RuntimeError, match=r"pass og.Private\(..., ledger="):
            session.privacy()
        session.detach()
        return session.stats().private_steps

    assert run_on_lasting_groups(2, body) == [0, 0]


def test_copies_count_in_the_same_ledger():
    ledger = Ledger(DELTA)
    private = private_of(ledger)
    assert copy.deepcopy(private).ledger is copy.copy(private).ledger is ledger
    assert repr(copy.deepcopy(private)) == repr(private)
    assert "ledger=Ledger(delta=1e-05), sampling=Poisson(rate=0.01, " in repr(private)


def test_a_training_of_one_site_alone_tells_of_the_model():
    def body(rank, group):
        return told_of(group, Ledger(DELTA, accountant="rdp"))[0]

    (told,) = run_on_lasting_groups(1, body)
    assert dict(told.epsilon) == {"model": pytest.approx(by_hand([(NOISE, 3)]), abs=1e-9)}


def test_others_see_no_more_of_a_site_that_goes_on_alone_than_the_model():
    ledger = Ledger(DELTA, accountant="rdp", colluding=2)
    ledger.record(Release(NOISE, Poisson(RATE), sites=4, sums="masked"), 5)
    ledger.record(Release(NOISE, Poisson(RATE), sites=2, sums="masked"), 3)
    ledger.record(Release(NOISE, Poisson(RATE), sites=1, sums="masked"), 2)
    noises = [(NOISE * math.sqrt(1 / 2), 5), (NOISE * math.sqrt(1 / 2), 3), (NOISE, 2)]
    assert ledger.epsilon("site") == pytest.approx(by_hand(noises), abs=1e-9)


# -- records --------------------------------------------------------------------------------------


class Told:
    """A recorder that keeps what it is told of privacy."""

    every = 2

    def __init__(self):
        self.events = []

    def record(self, event):
        if isinstance(event, og.events.Privacy):
            self.events.append(event)


def recorded(recorders, steps, **about):
    def body(rank, group):
        model = copy.deepcopy(MODEL)
        private = private_of(Ledger(DELTA, stop_at=9.0, accountant="rdp"), **about)
        settings = {"transform": private, "recorder": recorders[rank]}
        session = og.distribute(model, og.Dense(), group=group, **settings)
        for _ in range(steps):
            make_step(model)
        session.detach()

    run_on_lasting_groups(2, body)


def test_records_have_epsilon_whenever_it_has_grown_by_a_quarter_and_at_the_end():
    first, second = Told(), Told()
    recorded([first, second], 30)
    assert [one.steps for one in first.events] == [1, 3, 5, 7, 9, 13, 17, 23, 29, 30]
    for one, other in zip(first.events, second.events, strict=True):
        assert (one.steps, one.epsilon) == (other.steps, other.epsilon)
        assert one.step == one.steps
        assert one.epsilon["model"] == pytest.approx(by_hand([(NOISE, one.steps)]), abs=1e-9)
    last = first.events[-1]
    assert (last.delta, last.stop_at, last.against, last.unknown) == (DELTA, 9.0, "model", "")
    assert str(last).startswith("30 released steps: ε = ")
    assert str(last).endswith("(by RDP); it stops at ε = 9")


def test_what_was_recorded_is_watched_reported_and_stated(tmp_path):
    from outergrad._event_lines import event_of
    from outergrad.core.run_figures import Watched
    from outergrad.report import statement, summary
    from outergrad.report.recording import load
    from outergrad.tools.watch.picture import View, picture

    recorded([og.JSONL(tmp_path, every=1) for _ in range(2)], 8)
    sites_see = by_hand([(NOISE / math.sqrt(2), 8)])
    watched = Watched()
    for line in (tmp_path / "site-0.jsonl").read_text().splitlines():
        watched.take(event_of(json.loads(line)), 1.7e9)
    shown = picture(watched, View(tmp_path, 0, 1.7e9, 140, 40)).plain
    line = next(line for line in shown.splitlines() if "privacy" in line)
    (told,) = summary.released(load(tmp_path))
    model = float(told.split("ε = ")[1].split()[0])
    shown = f"ε {model:.3g} (model), {sites_see:.3g} (site), {sites_see:.3g} (hub)"
    assert " · ".join([shown, "stops at 9", "δ 1e-05", "8 released steps"]) in line
    assert told.startswith("8 released steps: ε = ")
    sections = statement.statement_of([tmp_path])
    (of_privacy,) = (one for one in sections if one.heading == "Ledger of privacy")
    assert of_privacy.facts[0] == ("Kept", told)
