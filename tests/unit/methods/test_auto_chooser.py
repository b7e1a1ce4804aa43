"""What og.Auto() chooses, with steps whose times are made up: no sites, no clock, no training."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import outergrad as og
from outergrad.comm.cost import RingCost
from outergrad.core.choosing import Rows, Trial
from outergrad.core.types import Link, Slot, Unit
from outergrad.methods.auto.chooser import AutoChooser
from outergrad.methods.auto.knowledge import Arm
from outergrad.methods.dense import DenseCompressor

METHODS = [og.Dense(), og.DAD(), og.RankDAD(rank=2)]
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
    methods: Sequence[og.core.protocols.Method] = METHODS,
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
        self, truth: Truth, noise: float = 0.0, sites: int = 2, seed: int = 0, link: Link = FAST
    ) -> None:
        self.truth, self.noise, self.rng = truth, noise, random.Random(seed)
        self.sites = [Site(new_chooser(link=link)) for _ in range(sites)]
        self.arms: list[Arm] = []
        self.looked_s = self.all_s = 0.0
        self.rows = rows_of(UNITS, 16, sites)
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
            self.all_s, self.looked_s = self.all_s + took_s, self.looked_s + took_s - kept_s
            noisy = self._noisy(took_s)
            self._end(step, [noisy * self.rng.uniform(0.98, 1.02) for _ in self.sites])
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


def test_the_right_way_in_nearly_all_settings():
    """Within 5% of the best one, as the medians of what it went by in the last steps say."""
    wrong = []
    for seed, (dense, dad, rank, noise) in enumerate(SETTINGS * 4):
        truth = by_whole(dense / 1e3, dad / 1e3, rank / 1e3)
        done = Training(truth, noise, seed=seed).run(2500)
        best = min(truth(arm, 0) for arm in [(0, 0), (1, 1), (2, 2)])
        wrong += [(dense, dad, rank, noise, done.kept)] * (truth(done.kept, 0) > 1.05 * best)
    assert len(wrong) <= 0.05 * 4 * len(SETTINGS), wrong
