"""Settings of an execution: sites, steps, and faults, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

KINDS = {
    "kill": 8,
    "pause": 6,
    "reset": 5,
    "cut line": 3,
    "cut site": 2,
    "slow store": 3,
    "dead store": 1,
    "damage": 4,
    "leave": 2,
}
"""Kinds of faults, with their weights in the draw."""
_EARLY = 0.7
"""Share of the faults that come at a resumption of a site's program, not by the clock."""


@dataclass(frozen=True)
class Fault:
    """A fault of a site.

    Attributes:
        kind: one of KINDS.
        site: site that it happens to.
        other: other end of a connection, or receiver of a damaged message.
        turn: number of the resumption of the site's program at which it happens; 0: by the clock.
        at_s: time by the clock, in seconds.
        for_s: duration in seconds.
        step: step of the damaged message, or step before which the site leaves.
    """

    kind: str
    site: int
    other: int = 0
    turn: int = 0
    at_s: float = 0.0
    for_s: float = 0.0
    step: int = 0

    def __str__(self) -> str:
        if self.kind in ("damage", "leave"):
            when = f"in step {self.step}"
        else:
            when = f"at turn {self.turn}" if self.turn else f"at {self.at_s:.3f} s"
        where = {"reset": f"-{self.other}", "cut line": f"-{self.other}"}.get(self.kind, "")
        return f"{self.kind} of site {self.site}{where} {when}"


@dataclass(frozen=True)
class Trial:
    """Settings of one execution.

    Attributes:
        seed: seed of all randomness in it.
        sites: number of sites.
        steps: number of steps that each site is to apply.
        timeout_s: T, seconds to wait for a message.
        longest_s: longest delay of a message, in seconds.
        host: site that holds the store, if any.
        sessions: number of sessions that alternate on the group.
        sums: whether a step is an all-reduce, in which no site knows for whom it waits.
        stays: whether processes stay when they are done.
        min_sites: sites that must be left to go on without others; None if sites never do.
        comes: times at which sites come that want to join, in seconds.
        every: steps per vote.
        waits: every how many steps one waits for its votes; 0 for none.
        busy: pairs of a site and a step before which it computes for three times T.
        faults: faults that happen.
    """

    seed: object
    sites: int
    steps: int
    timeout_s: float = 1.0
    longest_s: float = 0.1
    host: int | None = None
    sessions: int = 1
    sums: bool = False
    stays: bool = False
    min_sites: int | None = None
    comes: tuple[float, ...] = ()
    every: int = 16
    waits: int = 0
    busy: tuple[tuple[int, int], ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def gone(self) -> set[int]:
        """Sites that are killed, or leave by an error."""
        return {fault.site for fault in self.faults if fault.kind in ("kill", "leave")}

    @property
    def patient_s(self) -> float:
        """Seconds for which a site that comes waits to be admitted."""
        return 40 * self.timeout_s

    def __str__(self) -> str:
        what = f"{self.sites} sites, {self.steps} steps, T = {self.timeout_s:g} s"
        what += f", votes every {self.every} steps" + f", every {self.waits} waits" * bool(
            self.waits
        )
        if self.min_sites is not None:
            what += f", {self.min_sites} go on"
            what += "".join(f", one comes at {at_s:.3f} s" for at_s in self.comes)
        held = "outside" if self.host is None else f"with site {self.host}"
        busy = [f"site {site} computes for 3 T before step {step}" for site, step in self.busy]
        kind = "sums" if self.sums else "gathers"
        several = f", {self.sessions} sessions" if self.sessions > 1 else ""
        happens = "; ".join([*busy, *map(str, self.faults)]) or "nothing happens"
        return f"{what}, {kind}{several}, the store {held}; {happens}"


def draw(seed: object) -> Trial:
    """Draws the trial of a seed."""
    dice = random.Random(repr(("trial", seed)))
    sites, steps = dice.choice((2, 2, 3, 3, 3, 4)), dice.choice((1, 2, 2, 3))
    timeout_s = dice.choice((1.0, 1.0, 4.0))
    trial = Trial(
        seed,
        sites,
        steps,
        timeout_s,
        longest_s=dice.choice((0.02, 0.1, 0.3)) * timeout_s,
        host=dice.choice((None, None, 0)),
        sessions=dice.choice((1, 1, 2)),
        sums=dice.random() < 0.3,
        stays=dice.random() < 0.5,
    )
    many = dice.choice((0, 1, 1, 1, 2, 2, 3))
    faults = tuple(_fault(dice, trial) for _ in range(many))
    busy = ((dice.randrange(sites), dice.randrange(1, steps + 1)),) * (dice.random() < 0.3)
    return replace(trial, faults=faults, busy=busy)


def with_members(trial: Trial) -> Trial:
    """Returns a trial with votes at other steps; in half of all the membership changes.

    It is drawn apart, so that trials of a seed stay the same without it.
    """
    dice = random.Random(repr(("members", trial.seed)))
    trial = replace(trial, every=dice.choice((1, 2, 16)), waits=dice.choice((0, 0, 0, 1, 2)))
    if dice.random() < 0.5:
        return trial
    steps = trial.steps + dice.randrange(4)
    comes = tuple(dice.random() * 0.4 * steps for _ in range(dice.choice((0, 1, 1, 2))))
    min_sites = dice.randrange(1, trial.sites)
    faults = trial.faults
    if dice.random() < 0.3:  # a second victim, soon after the first
        first = [fault for fault in faults if fault.kind in ("kill", "cut site", "pause")][:1]
        faults += tuple(
            replace(one, site=(one.site + 1) % trial.sites, at_s=one.at_s + 0.3 * dice.random())
            for one in first
        )
    return replace(trial, steps=steps, min_sites=min_sites, comes=comes, faults=faults, host=None)


def _fault(dice: random.Random, trial: Trial) -> Fault:
    site = dice.randrange(trial.sites)
    kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
    early = dice.random() < _EARLY
    return Fault(
        kind,
        site,
        other=(site + dice.randrange(1, trial.sites)) % trial.sites,
        turn=dice.randrange(1, 16 * trial.steps) if early and "store" not in kind else 0,
        at_s=dice.random() * (0.4 * trial.steps + 0.2),
        for_s=trial.timeout_s * dice.choice((0.3, 1.1, 2.0, 5.0)),
        step=dice.randrange(trial.steps),
    )


def simpler(trial: Trial) -> list[Trial]:
    """Returns trials in which less happens, with the same seed."""
    fewer = [replace(trial, faults=_without(trial.faults, i)) for i in range(len(trial.faults))]
    if trial.busy:
        fewer.append(replace(trial, busy=()))
    fewer += [replace(trial, **less) for less in _LESS if _is_less(trial, less)]
    if trial.sites > 2 and all(trial.sites - 1 not in (f.site, f.other) for f in trial.faults):
        fewer.append(replace(trial, sites=trial.sites - 1))
    if trial.steps > 1:
        fewer.append(replace(trial, steps=trial.steps - 1))
    return fewer


_LESS: tuple[dict, ...] = (
    {"sessions": 1},
    {"sums": False},
    {"host": None},
    {"longest_s": 0.02},
    {"comes": ()},
    {"waits": 0},
)


def _is_less(trial: Trial, less: dict) -> bool:
    return any(getattr(trial, name) != value for name, value in less.items())


def _without(faults: tuple[Fault, ...], index: int) -> tuple[Fault, ...]:
    return faults[:index] + faults[index + 1 :]
