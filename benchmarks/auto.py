"""Whether og.Auto() chooses right: many made-up settings, drawn at random, with a known best way.

    python benchmarks/auto.py                    # 200 settings
    python benchmarks/auto.py --settings 5000    # some minutes

A setting is a model of a few groups of layers, sites of some speed, a link and how noisy machines
are: a step's seconds follow from it for every way to share the gradients, with an error of the
forecast, since the truth is not what the chooser expects. In some the link slows down, or becomes
faster, half-way. No processes, no clock, no training: the choosers of all sites hear made-up
seconds. Told are the share of settings in which what is kept at the end is within 5% of the best
one-method way, and what looking has cost behind the first thousand steps.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import outergrad as og
from outergrad.comm.cost import RingCost
from outergrad.core.choosing import Rows
from outergrad.core.compressor import Compressor
from outergrad.core.protocols import Method
from outergrad.core.types import Link, Route, Slot, Unit
from outergrad.methods.auto.chooser import AutoChooser
from outergrad.methods.auto.ways import Arm, Forecaster, route_of
from outergrad.methods.dense import DenseCompressor

EXACT: Sequence[Method] = (og.Dense(), og.DAD())
LOSSY: Sequence[Method] = (*EXACT, og.RankDAD(rank=4), og.Sparse(density=0.02))
NOISES = (0.01, 0.03, 0.1, 0.25)
"""Of a step; the last is that of a machine of two cores that others use, too."""
SETTLED = 1000
NEAR = 1.05


def compressors_of(methods: Sequence[Method], sites: int) -> list[Compressor]:
    """Theirs, on a ring of sites."""
    found = [method.compressor() or DenseCompressor() for method in methods]
    for compressor in found:
        compressor.settle(RingCost(sites), frozenset())
    return found


@dataclass(frozen=True)
class Setting:
    """What decides how long steps take.

    Attributes:
        units: of the model.
        rows: of every unit, site and slot.
        sites: how many.
        methods: to choose among.
        link: that the sites measure.
        flops_per_s: of their machines.
        base_s: of a step without its exchange.
        errors: of each method, how far the forecast of its arithmetic is off.
        noise: standard deviation of a step, relative; a twentieth take several times as long.
        slower: how many times as slow the link is from the middle on.
    """

    units: tuple[Unit, ...]
    rows: Rows
    sites: int
    methods: Sequence[Method]
    link: Link
    flops_per_s: float
    base_s: float
    errors: tuple[float, ...]
    noise: float
    slower: float

    @staticmethod
    def drawn(rng: random.Random) -> Setting:
        """At random."""
        sites, methods = rng.choice((2, 2, 4)), rng.choice((EXACT, LOSSY))
        widths = [2 ** rng.randint(4, 11) for _ in range(rng.randint(2, 8))]
        slots = [Slot(f"{k}", f"{k}.weight", o, i) for k, (i, o) in enumerate(pairwise(widths))]
        units = tuple(Unit((slot,), (slot.weight,), slot.numel, (slot,)) for slot in slots)
        rows = 2 ** rng.randint(3, 11)
        flops = 10 ** rng.uniform(9.5, 11.5)
        arithmetic = sum(4 * rows * unit.dense_numel for unit in units)
        return Setting(
            units=units,
            rows={unit: [[rows]] * sites for unit in units},
            sites=sites,
            methods=methods,
            link=Link(10 ** rng.uniform(-4.5, -1.7), 10 ** rng.uniform(6, 9.3)),
            flops_per_s=flops,
            base_s=arithmetic / flops + 10 ** rng.uniform(-3, -2),
            errors=tuple(10 ** rng.uniform(-0.5, 0.5) for _ in methods),
            noise=rng.choice(NOISES),
            slower=rng.choice((1.0, 1.0, 1.0, 0.2, 5.0)),
        )

    def tables(self) -> list[tuple[list[float], list[float]]]:
        """Per unit and method, seconds of the link and of the machine."""
        forecaster = Forecaster(RingCost(self.sites), self.link, self.flops_per_s)
        compressors, found = compressors_of(self.methods, self.sites), []
        for unit in self.units:
            of = [forecaster.unit(unit, one, self.rows[unit]) for one in compressors]
            routes = [route_of(unit, one, self.rows[unit]) for one in compressors]
            same = [0 if route == Route.DENSE else k for k, route in enumerate(routes)]
            compute = [f.compute_s * self.errors[k] for f, k in zip(of, same, strict=True)]
            found.append(([f.link_s for f in of], compute))
        return found


@dataclass
class Result:
    """What came of a setting.

    Attributes:
        over_best: a step of what is kept at the end, over one of the best way of one method.
        looking: what steps took more than by what was kept, of all time behind the first steps.
    """

    over_best: float
    looking: float


def run(setting: Setting, steps: int, rng: random.Random) -> Result:
    """Trains for so many steps; all sites choose alike, or it raises."""
    sites = [_chooser(setting) for _ in range(setting.sites)]
    groups = sites[0]._groups
    place = {unit: g for g, group in enumerate(groups) for unit in group}
    tables = setting.tables()
    about = list(zip(setting.units, tables, strict=True))

    def seconds(arm: Arm, step: int) -> float:
        slower = setting.slower if step >= steps // 2 else 1.0
        kinds = [(arm[place[unit]], table) for unit, table in about]
        link_s = sum(link[k] for k, (link, _) in kinds)
        compute_s = sum(compute[k] for k, (_, compute) in kinds)
        return setting.base_s + compute_s + slower * (link_s + setting.link.delay_s)

    said: list[Sequence[float]] = []
    known: dict[tuple[Arm, bool], float] = {}
    all_s = more_s = 0.0
    for step in range(steps):
        arm, kept = sites[0]._arm(step), sites[0]._kept
        late = step >= steps // 2
        for one in (arm, kept):
            if (one, late) not in known:
                known[one, late] = seconds(one, step)
        took_s = known[arm, late]
        settled = SETTLED <= step < steps // 2 or step >= steps // 2 + SETTLED
        all_s += took_s * settled
        more_s += max(took_s - known[kept, late], 0.0) * settled
        noisy = took_s * _noise(setting.noise, rng)
        if sites[0].hears(step) and said:
            trials = [site.take(step, said, setting.rows) for site in sites]
            assert all(trial == trials[0] for trial in trials)
        told = [site.ended(step, noisy * rng.uniform(0.98, 1.02)) for site in sites]
        said = [list(own) for own in told] if all(told) else said
        assert len({site._arm(step + 1) for site in sites}) == 1, "the sites choose differently"
    ways = [(k,) * len(groups) for k in range(len(setting.methods))]
    best = min(seconds(arm, steps) for arm in ways)
    return Result(seconds(sites[0]._kept, steps) / best, more_s / max(all_s, 1e-12))


def _chooser(setting: Setting) -> AutoChooser:
    compressors = compressors_of(setting.methods, setting.sites)
    chooser = AutoChooser(setting.units, setting.methods, compressors, looking=0.01)
    chooser.settle(RingCost(setting.sites), setting.link, setting.flops_per_s)
    return chooser


def _noise(sigma: float, rng: random.Random) -> float:
    pause = rng.uniform(1, 5) * (rng.random() < 0.05)
    return max(rng.gauss(1, sigma), 0.2) + pause


def results(settings: int, steps: int, seed: int) -> list[tuple[Setting, Result]]:
    """Of so many settings."""
    rng = random.Random(seed)
    drawn = [Setting.drawn(rng) for _ in range(settings)]
    return [(setting, run(setting, steps, rng)) for setting in drawn]


def share_right(found: Sequence[tuple[Setting, Result]]) -> float:
    """Of settings in which what is kept is near the best."""
    return sum(result.over_best <= NEAR for _, result in found) / len(found)


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--settings", type=int, default=200)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(given)
    found = results(args.settings, args.steps, args.seed)
    for noise in NOISES:
        own = [pair for pair in found if pair[0].noise == noise]
        if own:
            worst = max(result.over_best for _, result in own)
            print(
                f"noise {noise:.2f}: right in {share_right(own):.1%} of {len(own)}, "
                f"at worst {worst:.2f} times the best"
            )
    looking = [result.looking for _, result in found]
    print(
        f"all: right in {share_right(found):.1%}; looking costs {median(looking):.2%} of the "
        f"time, at most {max(looking):.2%}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
