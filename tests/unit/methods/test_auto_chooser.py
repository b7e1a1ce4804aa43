"""What og.Auto() chooses, with steps whose times are made up: no sites, no clock, no training."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import pytest

import outergrad as og
from outergrad.comm.cost import RingCost
from outergrad.core.choosing import Outcome, Rows, Trial
from outergrad.core.protocols import Method
from outergrad.core.types import Link, Slot, Unit
from outergrad.methods.auto.chooser import MOST_GROUPS, AutoChooser, grouped
from outergrad.methods.auto.trials import lower_bound
from outergrad.methods.auto.ways import Arm
from outergrad.methods.dense import DenseCompressor

METHODS = [og.Dense(), og.DAD(), og.RankDAD(rank=2)]
MANY_ROWS = og.DAD(always=True)
LINK = Link(1e-4, 12.5e6)
FAST = Link(1e-5, 1e9)
FLOPS = 2e10
Truth = Callable[[Arm, int], float]
"""Seconds of a step that goes so, by its number."""


def unit(name: str, outputs: int = 256, inputs: int = 256) -> Unit:
    slot = Slot(name, f"{name}.weight", outputs, inputs)
    return Unit((slot,), (slot.weight,), slot.numel, (slot,))


UNITS = [unit("first", 512, 512), unit("second", 64, 64)]


def rows_of(units: Sequence[Unit], rows: int, sites: int = 2) -> Rows:
    return {one: [[rows]] * sites for one in units}


@dataclass
class Site:
    """A chooser and what it told."""

    chooser: AutoChooser
    trials: list[Trial] = field(default_factory=list)


def new_chooser(
    methods: Sequence[Method] = METHODS,
    units: Sequence[Unit] = UNITS,
    link: Link = LINK,
    looking: float = 0.01,
) -> AutoChooser:
    compressors = [method.compressor() or DenseCompressor() for method in methods]
    for compressor in compressors:
        compressor.settle(RingCost(2), frozenset())
    chooser = AutoChooser(units, methods, compressors, looking)
    chooser.settle(RingCost(2), link, FLOPS)
    return chooser


class Training:
    """Sites that train together, and agree after every step on what comes.

    Args:
        truth: how long steps take.
        noise: of a step, of which a site does not know; a twentieth of the steps take far longer.
        sites: how many.
    """

    def __init__(
        self,
        truth: Truth,
        noise: float = 0.0,
        sites: int = 2,
        seed: int = 0,
        link: Link = FAST,
        methods: Sequence[Method] = METHODS,
    ) -> None:
        self.truth, self.noise, self.rng = truth, noise, random.Random(seed)
        self.sites = [Site(new_chooser(methods, link=link)) for _ in range(sites)]
        self.arms: list[Arm] = []
        self.looked_s = self.all_s = self.change_s = 0.0
        self.rows = rows_of(UNITS, 16, sites)
        self.slower: Callable[[int, Arm], float] = lambda site, arm: 1.0
        self._said: list[Sequence[float]] = []

    def _noisy(self, seconds: float) -> float:
        pause = 5 * (self.rng.random() < 0.05) * (self.noise > 0)
        return seconds * (max(self.rng.gauss(1, self.noise), 0.2) + pause)

    def run(self, steps: int) -> Training:
        for step in range(len(self.arms), len(self.arms) + steps):
            arms = {site.chooser._arm(step) for site in self.sites}
            assert len(arms) == 1, "the sites choose differently"
            self.arms.append(arms.pop())
            following = [site.chooser._arm(step + 1) for site in self.sites]
            took_s, kept_s = (self.truth(arm, step) for arm in (self.arms[-1], self.kept))
            took_s += self.change_s * (len({*self.arms[-3:]}) > 1)  # two steps behind a change
            self.all_s, self.looked_s = self.all_s + took_s, self.looked_s + took_s - kept_s
            noisy = self._noisy(took_s)
            took = [self.slower(k, self.arms[-1]) * noisy for k in range(len(self.sites))]
            self._end(step, [self.rng.uniform(0.98, 1.02) * s for s in took])
            assert [site.chooser._arm(step + 1) for site in self.sites] == following
        return self

    def _end(self, step: int, took: Sequence[float]) -> None:
        for site in self.sites:
            if site.chooser.hears(step) and self._said:
                trial = site.chooser.take(step, self._said, self.rows)
                site.trials += [trial] if trial else []
        said = [s.chooser.ended(step, own) for s, own in zip(self.sites, took, strict=True)]
        self._said = said if all(said) else self._said

    @property
    def kept(self) -> Arm:
        return self.sites[0].chooser._kept


def by_whole(*seconds: float) -> Truth:
    """By how many elements travel by which method; the first layers are nearly all."""
    weights = [one.dense_numel for one in UNITS]

    def truth(arm: Arm, step: int) -> float:
        return sum(w * seconds[k] for w, k in zip(weights, arm, strict=True)) / sum(weights)

    return truth


SETTINGS = [
    (dense, dad, rank, noise)
    for dense, dad, rank in [
        (10.0, 20.0, 15.0),
        (10.0, 8.0, 12.0),
        (10.0, 9.0, 8.0),
        (30.0, 10.0, 12.0),
        (12.0, 30.0, 10.0),
        (10.0, 11.0, 40.0),
    ]
    for noise in (0.02, 0.05, 0.1)
]


@pytest.mark.slow
def test_the_right_way_in_nearly_all_settings():
    """Within 5% of the best one, as the medians of what it went by in the last steps say."""
    wrong = []
    for seed, (dense, dad, rank, noise) in enumerate(SETTINGS * 4):
        truth = by_whole(dense / 1e3, dad / 1e3, rank / 1e3)
        done = Training(truth, noise, seed=seed).run(2500)
        best = min(truth(arm, 0) for arm in [(0, 0), (1, 1), (2, 2)])
        wrong += [(dense, dad, rank, noise, done.kept)] * (truth(done.kept, 0) > 1.05 * best)
    assert len(wrong) <= 0.05 * 4 * len(SETTINGS), wrong


@pytest.mark.parametrize("times", [(10.0, 20.0, 15.0), (10.0, 8.0, 100.0), (10.0, 9.5, 10.5)])
def test_at_most_a_hundredth_of_the_time_goes_into_looking(times):
    """And a few steps in advance."""
    truth = by_whole(*(s / 1e3 for s in times))
    done = Training(truth, 0.05, seed=3).run(6000)
    assert 0 < done.looked_s <= 0.01 * done.all_s + 16 * truth(done.kept, 0)


def test_changes_from_one_way_to_another_are_paid_for_too():
    """Where ways take the same time they are all that looking costs."""
    truth = by_whole(0.0100, 0.0101, 0.0101)
    done = Training(truth, 0.05, seed=3)
    done.change_s = 0.005
    done.run(6000)
    assert 0 < done.looked_s <= 0.01 * done.all_s + 16 * truth(done.kept, 0)


def test_what_takes_twice_as_long_is_dropped_after_a_glance():
    """And not looked at again soon."""
    done = Training(by_whole(0.010, 0.011, 0.030)).run(400)
    trials = [t.methods for t in done.sites[0].trials if t.outcome == Outcome.TWICE]
    assert trials.count(("RankDAD(rank=2)", "Dense()")) == 1
    assert done.arms.count((2, 0)) == 3


def test_what_a_glance_finds_too_slow_gets_no_turns():
    done = Training(by_whole(0.010, 0.011, 0.014)).run(120)
    slower = [t.methods for t in done.sites[0].trials if t.outcome == Outcome.SLOWER]
    assert ("RankDAD(rank=2)", "Dense()") in slower
    assert done.arms.count((2, 0)) == 3


def test_it_asks_again_when_steps_take_another_time():
    """A link that slows down makes of the best way the worst."""
    change = 1500

    def truth(arm: Arm, step: int) -> float:
        now = (0.010, 0.012, 0.015) if step < change else (0.050, 0.040, 0.016)
        return by_whole(*now)(arm, step)

    done = Training(truth, 0.03).run(change)
    assert done.kept == (0, 0)
    assert done.run(500).kept[0] == 2


def test_the_slowest_site_decides():
    """A way that is faster at one site, and slower at another, is not taken."""
    done = Training(by_whole(0.010, 0.010, 0.010))
    factor = {0: (1.0, 1.0, 0.5), 1: (1.0, 1.0, 1.3)}
    done.slower = lambda site, arm: factor[site][arm[0]]
    assert done.run(2000).kept[0] != 2


def test_it_goes_on_with_what_it_knew():
    """On every site alike, and without trying again what was just tried."""
    before = Training(by_whole(0.010, 0.030, 0.008), 0.02).run(600)
    state = before.sites[0].chooser.state(599)
    after = new_chooser(link=FAST)
    after.load(state, 599, same_sites=True)
    assert after.state(599) == state | {"last": state["last"]}
    elsewhere = new_chooser(link=FAST)
    elsewhere.load(state, 599, same_sites=False)
    assert elsewhere.kept_seconds is None
    assert [elsewhere.method_of(u) for u in UNITS] == [after.method_of(u) for u in UNITS]
    assert not any(elsewhere.trials_of(u) for u in UNITS)


def test_layers_alike_are_in_one_group_and_there_are_few():
    units = [unit(f"{k}", 2 ** (k % 10), 64) for k in range(100)]
    groups = grouped(units)
    assert len(groups) <= MOST_GROUPS
    assert sorted(u.slots[0].layer for g in groups for u in g) == sorted(map(str, range(100)))
    assert grouped(units) == groups


def test_the_lower_bound_is_seldom_above_the_median():
    rng, above = random.Random(1), 0
    for _ in range(2000):
        above += lower_bound([rng.expovariate(1) - 0.6931 for _ in range(16)]) > 0
    assert above <= 0.02 * 2000
    assert lower_bound([1.0] * 3) == float("-inf")
    assert median([lower_bound([rng.gauss(1, 0.5) for _ in range(16)]) for _ in range(50)]) > 0


@pytest.mark.parametrize("seconds", [(10.0, 10.0, 10.1), (10.0, 12.0, 10.0), (10.0, 9.0, 9.9)])
def test_trials_send_at_most_a_twentieth_more_than_dense_at_any_step(seconds):
    """Raw factors of many rows are twice the bytes of dense, and about as fast on a fast link."""
    training = Training(by_whole(*seconds), 0.05, methods=[og.Dense(), og.DAD(), MANY_ROWS])
    training.rows = rows_of(UNITS, 1024)
    training.run(4000)
    ways = training.sites[0].chooser._ways
    assert ways.more_bytes((2, 2)) == pytest.approx(1)
    more, tried = 0.0, 0
    for step, arm in enumerate(training.arms):
        more += ways.more_bytes(arm)
        tried += 2 in arm
        assert more <= 0.05 * step
    assert tried, "a trial that can be afforded is made"
