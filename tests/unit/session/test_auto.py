"""og.Auto() in sessions with made-up clocks: right gradients whatever is tried, all sites alike."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import outergrad as og
from cases import Boom, mlp, relative_error
from outergrad.core.errors import ExchangeError
from outergrad.core.sites import sites_of
from outergrad.core.types import Link, StateDict
from outergrad.methods.auto.chooser import AutoChooser
from outergrad.session import attach
from outergrad.session.choosing import Figures
from outergrad.session.inspect import inspect
from ranks import run_on_lasting_groups, run_ranks, try_ranks
from watched import owed_by

START = mlp(60, 80, 70, 10)
ROWS = torch.randn(4, 16, 60, generator=torch.Generator().manual_seed(2))
EXACT = og.Auto(among=[og.DAD(reveal="activations"), og.RankDAD(rank=1000)], looking=1.0)
LOSSY = og.Auto(among=[og.RankDAD(rank=2), og.Sparse(density=0.05)], looking=1.0)
SECONDS = {"DenseCompressor": 3.0, "DADCompressor": 2.0, "LowRankCompressor": 1.0}
Clock = Callable[[str, random.Random], float]
"""Seconds that a unit with such a compressor takes in a step."""


def by_kind(kind: str, _rng: random.Random) -> float:
    return SECONDS.get(kind, 4.0)


def at_random(_kind: str, rng: random.Random) -> float:
    return 1 + 2 * rng.random()


@dataclass
class Told:
    """A recorder of trials."""

    every: int = 10**9
    budget: float = 1e-9
    trials: list[og.events.Trial] = field(default_factory=list)

    def record(self, event: og.events.Event) -> None:
        if isinstance(event, og.events.Trial):
            self.trials.append(event)


class Site:
    """A model that trains by a policy, and what became of its gradients."""

    def __init__(self, rank: int, group: Any, method: og.Auto, clock: Clock = by_kind) -> None:
        self.rank, self.rng = rank, random.Random(rank)
        self.model, self.told = copy.deepcopy(START), Told()
        self.session = og.distribute(self.model, method, group=group, recorder=self.told)
        self.went: list[tuple[int, ...]] = []
        self._seconds, self._of = 0.0, clock
        assert self.session._choosing is not None
        self.session._choosing.clock = self._clock

    def _clock(self) -> float:
        compressors = self.session._exchange.compressors
        kinds = [type(compressors[unit]).__name__ for unit in self.session._exchange.model.units]
        self.went.append(compressors._assigned)
        self._seconds += sum(self._of(kind, self.rng) for kind in kinds)
        return self._seconds

    def step(self, k: int) -> dict[str, Tensor]:
        self.model.zero_grad()
        (self.model(batch(self.rank, k)) ** 2).mean().backward()
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}


def batch(rank: int, k: int) -> Tensor:
    return (1 + k % 3) * ROWS[rank]


def pooled(k: int, sites: int) -> dict[str, Tensor]:
    """The mean gradient in float64, without any of our code."""
    model = copy.deepcopy(START).double()
    for rank in range(sites):
        ((model(batch(rank, k).double()) ** 2).mean() / sites).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """The same link and machine every time: by these, dense is best."""
    monkeypatch.setattr(attach, "measured_link", lambda comm: Link(1e-5, 1e12))
    monkeypatch.setattr(attach, "measured_flops", lambda comm: 1e10)


@pytest.fixture
def at_every_step(monkeypatch):
    """Another way in nearly every step, as no trial would go."""

    def arm(self, step):
        rng = random.Random(step)
        return tuple(rng.randrange(len(self._methods)) for _ in self._groups)

    monkeypatch.setattr(AutoChooser, "_arm", arm)


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.usefixtures("at_every_step")
def test_every_gradient_is_exact_whatever_is_tried(sites):
    def body(rank, group):
        site = Site(rank, group, EXACT)
        found = [site.step(k) for k in range(40)]
        site.session.detach()
        return found, site.went

    results = run_on_lasting_groups(sites, body)
    assert len(set(results[0][1])) >= 10
    assert all(went == results[0][1] for _, went in results)
    expected = [pooled(k, sites) for k in range(3)]
    for found, _ in results:
        for k, gradients in enumerate(found):
            for name, gradient in gradients.items():
                assert relative_error(gradient, expected[k % 3][name]) < 5e-6, (k, name)


@pytest.mark.usefixtures("at_every_step")
def test_nothing_of_a_gradient_is_lost_between_lossy_methods():
    """What was applied and what the sites owe add up to what they had."""
    steps = 40

    def body(rank, group):
        site, applied = Site(rank, group, LOSSY, at_random), {}
        for k in range(steps):
            for name, gradient in site.step(k).items():
                applied[name] = applied.get(name, 0) + gradient.double()
        owed = owed_by(site.session)
        site.session.detach()
        return applied, owed, site.went

    (applied, first, went), (_, second, _) = run_on_lasting_groups(2, body)
    assert len(set(went)) >= 10
    had = [pooled(k, 2) for k in range(3)]
    for name, whole in applied.items():
        owing = first.get(name, 0) + second.get(name, 0)
        total = sum(2 * had[k % 3][name] for k in range(steps))
        assert relative_error(2 * whole + owing, total) < 1e-6, name


def test_the_fastest_way_is_found_and_told():
    """In the choice, in the table, and to recorders."""

    def body(rank, group):
        site = Site(rank, group, LOSSY)
        for k in range(110):
            site.step(k)
        told = str(site.session.coverage()), site.session.choice(), site.told.trials
        site.session.detach()
        return told

    (table, choice, trials), (_, other, heard) = run_on_lasting_groups(2, body)
    assert choice == other
    assert choice["0.weight"] == og.RankDAD(rank=2)
    assert "Auto: RankDAD(rank=2), " in table
    assert table.count("Auto: ") == len(choice)
    assert "Dense() " in table
    assert " in step " in table
    assert [(t.step, t.methods, t.seconds, t.outcome) for t in trials] == [
        (t.step, t.methods, t.seconds, t.outcome) for t in heard
    ]
    assert {t.outcome for t in trials} >= {"faster", "twice as long"}


def test_a_frozen_choice_repeats_to_the_bit():
    def body(rank, group):
        site = Site(rank, group, LOSSY, at_random)
        for k in range(60):
            site.step(k)
        choice = site.session.choice()
        site.session.detach()
        runs = []
        for _ in range(2):
            model = copy.deepcopy(START)
            session = og.distribute(model, og.Auto(frozen=choice), group=group)
            for k in range(5):
                model.zero_grad()
                (model(batch(rank, k)) ** 2).mean().backward()
            runs.append([p.grad for p in model.parameters()])
            assert session._choosing is None
            session.detach()
        return runs

    for once, again in run_on_lasting_groups(2, body):
        assert all(map(torch.equal, once, again))


@pytest.mark.parametrize("steps", [2, 24, 61])
def test_a_saved_session_goes_on_with_what_it_knew(steps):
    """Also saved in the middle of a trial: nothing of a gradient is lost."""

    def body(rank, group):
        site, applied = Site(rank, group, LOSSY, at_random), {}
        for k in range(steps):
            book(applied, site.step(k))
        state, choice = site.session.state_dict(), site.session.choice()
        trials = str(site.session.coverage())
        site.session.detach()
        site = Site(rank, group, LOSSY, at_random)
        site.session.load_state_dict(state)
        assert site.session.choice() == choice
        assert trials.count("Auto: ") == str(site.session.coverage()).count("Auto: ")
        for k in range(steps, steps + 60):
            book(applied, site.step(k))
        owed = owed_by(site.session)
        site.session.detach()
        return applied, owed, site.went

    (applied, first, went), (_, second, same) = run_on_lasting_groups(2, body)
    assert went == same
    had = [pooled(k, 2) for k in range(3)]
    for name, whole in applied.items():
        total = sum(2 * had[k % 3][name] for k in range(steps + 60))
        owing = first.get(name, 0) + second.get(name, 0)
        assert relative_error(2 * whole + owing, total) < 1e-6, name


def book(applied: dict[str, Any], gradients: dict[str, Tensor]) -> None:
    for name, gradient in gradients.items():
        applied[name] = applied.get(name, 0) + gradient.double()


def test_another_number_of_sites_goes_on_with_what_was_kept():
    states: list[StateDict] = []

    def save(rank, group):
        site = Site(rank, group, LOSSY)
        for k in range(110):
            site.step(k)
        state = site.session.state_dict()
        site.session.detach()
        return state

    def go_on(rank, group):
        site = Site(rank, group, LOSSY)
        site.session.load_state_dict(states)
        choice = site.session.choice()
        for k in range(30):
            site.step(k)
        site.session.detach()
        return choice, site.went

    states += run_on_lasting_groups(2, save)
    found = run_on_lasting_groups(3, go_on)
    assert all(one == found[0] for one in found)
    assert found[0][0]["0.weight"] == og.RankDAD(rank=2)


def test_steps_that_come_to_nothing_change_nothing_of_the_turns():
    """The backward of a site raises now and then, also where figures are on their way."""

    def body(rank, group):
        site = Site(rank, group, LOSSY, at_random)
        for k in range(45):
            bad = k % 7 == 3
            site.model.zero_grad()
            y = Boom.apply(site.model[0](batch(rank, k)), bad and rank == 1)
            try:
                (site.model[1:](y) ** 2).mean().backward()
            except (ArithmeticError, og.StepDiscardedError):
                assert bad
            else:
                assert not bad
        site.session.detach()
        return site.went

    first, second = run_on_lasting_groups(2, body)
    assert first == second
    assert len(set(first)) >= 2


def test_a_site_that_is_lost_while_it_says_its_times_ends_the_next_step(monkeypatch):
    """The step before counts, and its gradients stay; nobody hangs."""
    heard = Figures.heard

    def lost(self):
        if self._comm.rank == 1:
            self._comm.close()
            raise ExchangeError("site 0 is gone", (0,))
        return heard(self)

    monkeypatch.setattr(Figures, "heard", lost)

    def body(rank, group):
        site, last = Site(rank, group, LOSSY), {}
        try:
            for k in range(20):
                last = site.step(k)
        except og.SiteLostError as error:
            return k, last, str(error)
        return None

    for found in try_ranks(2, body):
        assert not isinstance(found, BaseException), found
        k, last, _ = found
        assert k == 5
        assert last.keys() == dict(START.named_parameters()).keys()


def test_figures_that_are_damaged_are_refused():
    def body(rank, group):
        site = Site(rank, group, LOSSY)
        figures = site.session._choosing._figures
        figures.say(3, [0.5, 0.25])
        good = figures.heard()
        own = figures._comm.control([1, 2, 3, 4, 5, 6])
        bad = own.tolist()
        site.session.detach()
        return good, figures, bad

    for good, figures, bad in run_on_lasting_groups(2, body):
        assert good == [[0.5, 0.25]] * 2
        with pytest.raises(ExchangeError, match="something else"):
            figures._seconds(bad, 3, sites_of(2, ())[0])


def test_on_a_single_site_nothing_is_measured():
    def body(rank, group):
        model = copy.deepcopy(START)
        session = og.distribute(model, LOSSY, group=group)
        (model(ROWS[0]) ** 2).mean().backward()
        assert session._choosing is None
        session.detach()

    run_ranks(1, body)


def test_what_cannot_be_chosen_is_refused_by_name():
    with pytest.raises(TypeError, match="Local"):
        og.Auto(among=[og.Local()])
    with pytest.raises(ValueError, match="every"):
        og.Auto(among=[og.RankDAD(every=2)])
    with pytest.raises(ValueError, match="looking"):
        og.Auto(looking=0)
    with pytest.raises(ValueError, match=r"nothing was chosen for '0.weight'"):
        inspect(START, og.Auto(frozen={"0.bias": og.DAD()}), og.RULES)


def test_sites_compare_what_is_frozen():
    same = [og.Auto(frozen={"a": og.DAD(), "b": og.Dense()}) for _ in range(2)]
    other = og.Auto(frozen={"a": og.Dense(), "b": og.DAD()})
    assert repr(same[0]) == repr(same[1]) != repr(other)
    assert len(repr(other)) < 100
