"""Many random executions of a protocol, and the simplest one that fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from outergrad_lab.checking.hub import Hub
from outergrad_lab.checking.judging import Verdict, judge
from outergrad_lab.checking.site import Site
from outergrad_lab.checking.trial import Fault, Trial, draw, simpler, with_members
from outergrad_lab.checking.world import Process, World

Protocol = Callable[[Process, Hub, Trial], Site]

_END_S = 1000.0
_CHANCES = 40
"""Number of seeds with which a simpler trial is tried, to fail as well."""


def execute(trial: Trial, protocol: Protocol, *, traced: bool = False) -> tuple[Verdict, list[str]]:
    """Runs one execution.

    Returns:
        The verdict, and one line per event if traced.
    """
    world = World(trial.seed, traced=traced)
    processes = [Process(world, name) for name in range(trial.sites + len(trial.comes))]
    hub = Hub(world, processes, trial)
    sites = [protocol(process, hub, trial) for process in processes]
    for fault in trial.faults:
        _plan(fault, world, sites, hub)
    for site in sites:
        site.process.start(site.program())
    world.run(_END_S)
    return judge(trial, [site.ending for site in sites], hub.wrong), world.lines


def _plan(fault: Fault, world: World, sites: list[Site], hub: Hub) -> None:
    happens = partial(_happen, fault, world, sites, hub)
    if fault.kind in ("damage", "leave"):
        return
    if fault.turn:
        sites[fault.site].process.at_turn[fault.turn] = happens
    else:
        world.at(fault.at_s, happens)


def _happen(fault: Fault, world: World, sites: list[Site], hub: Hub) -> None:
    process, epoch = sites[fault.site].process, hub.epochs[-1]
    if fault.kind != "pause":
        world.note("*", str(fault))
    if fault.kind == "kill":
        process.end()
    elif fault.kind == "pause":
        process.pause(fault.for_s)
    elif fault.kind in ("reset", "cut line"):
        if {fault.site, fault.other} <= set(epoch.names):
            ends = epoch.names.index(fault.site), epoch.names.index(fault.other)
            (epoch.network.close if fault.kind == "reset" else epoch.network.cut)(*ends)
    elif fault.kind == "cut site":
        hub.cut(fault.site)
    elif fault.kind == "slow store":
        epoch.store.slow_until = world.now + fault.for_s
    else:
        for one in hub.epochs:
            one.store.dead = True


@dataclass
class Found:
    """Totals over many executions.

    Attributes:
        executions: number of executions.
        lost: number of those in which some site lost another.
        doubted: number of those in which sites differed.
        needless: number of those in which sites reported a possible difference, but none differed.
        wrong: number of failures by kind.
        seeds: seed of the first failure of each kind.
    """

    executions: int = 0
    lost: int = 0
    doubted: int = 0
    needless: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    seeds: dict[str, object] = field(default_factory=dict)

    def add(self, seed: object, verdict: Verdict) -> None:
        """Adds the verdict on one execution."""
        self.executions += 1
        self.lost += verdict.lost
        self.doubted += verdict.doubted
        self.needless += verdict.needless
        for kind in kinds(verdict):
            self.wrong[kind] += 1
            self.seeds.setdefault(kind, seed)

    def merge(self, other: Found) -> None:
        """Adds the totals of another object."""
        self.executions += other.executions
        self.lost += other.lost
        self.doubted += other.doubted
        self.needless += other.needless
        self.wrong.update(other.wrong)
        self.seeds = {**other.seeds, **self.seeds}


def kinds(verdict: Verdict) -> set[str]:
    """Returns the kinds of failures in a verdict, a word each."""
    return {told.split(":")[0] for told in verdict.wrong}


def drawn(seed: object, protocol: Protocol) -> Trial:
    """Returns the trial of a seed, with changes of the membership if the protocol knows them."""
    trial = draw(seed)
    return with_members(trial) if getattr(protocol, "has_members", False) else trial


def explore(protocol: Protocol, seeds: Iterable[object]) -> Found:
    """Runs an execution of each seed."""
    found = Found()
    for seed in seeds:
        found.add(seed, execute(drawn(seed, protocol), protocol)[0])
    return found


def shrunk(trial: Trial, protocol: Protocol, kind: str) -> Trial:
    """Returns a trial that fails in the same way, with as little as possible in it."""
    for less in simpler(trial):
        for chance in range(_CHANCES):
            other = replace(less, seed=trial.seed if chance == 0 else f"{trial.seed}/{chance}")
            if kind in kinds(execute(other, protocol)[0]):
                return shrunk(other, protocol, kind)
    return trial
