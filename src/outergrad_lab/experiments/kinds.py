"""Tasks of the kinds that are measured or planned, and all kinds by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from outergrad.launch.errors import RecipeError
from outergrad.launch.links import ShapedLink, parse_link, what_is_missing
from outergrad.tools.plan.forecast import Forecast, Question, forecast
from outergrad.tools.plan.measure import Planned
from outergrad_lab.bench.around_hub import AroundHub, time_around_hub
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.results import Timing
from outergrad_lab.bench.run import bench
from outergrad_lab.experiments.audited import AuditWork
from outergrad_lab.experiments.autospec import AutospecWork
from outergrad_lab.experiments.coding import CodingWork
from outergrad_lab.experiments.correction import CorrectionWork
from outergrad_lab.experiments.drift import DriftWork
from outergrad_lab.experiments.forward import ForwardWork
from outergrad_lab.experiments.gossip import GossipWork
from outergrad_lab.experiments.iterations import IterationsWork
from outergrad_lab.experiments.pruning import PruningWork
from outergrad_lab.experiments.pushing import PushingWork
from outergrad_lab.experiments.rank_bounds import RankBoundsWork
from outergrad_lab.experiments.selection import SelectionWork
from outergrad_lab.experiments.task import Context, Settings, Work, at_least, read
from outergrad_lab.experiments.training import TrainingWork
from outergrad_lab.peers.named import attach_of
from outergrad_lab.training.job import Job
from outergrad_lab.workloads import WORKLOADS

ROUNDS = 10
"""Blocks of steps of a method, at most: fast methods need no more for a precise time."""


@dataclass(frozen=True, kw_only=True)
class TimingWork:
    """Times steps of several methods by turns, each site a process in a network of its own.

    Attributes:
        workload, sites, link, methods, rtt: As `outergrad bench` has them.
        seconds: Seconds for all methods together.
        optional: Whether a machine that cannot shape links leaves the task out, with
            ``{"skipped": why}`` as its result.
    """

    workload: str
    sites: int = at_least(2)
    link: str
    methods: tuple[str, ...]
    rtt: str = "0ms"
    seconds: float = 20
    optional: bool = False

    def __post_init__(self) -> None:
        """Refuses what cannot be measured, or not on this machine."""
        _ = self.plan(Plan.data_dir)
        if self.missing and not self.optional:
            raise RecipeError(f"{self.missing}; or make the task optional: true")

    def plan(self, data_dir: Path) -> Plan:
        """Returns the settings for the benchmark."""
        return Plan(
            workload=self.workload,
            methods=self.methods,
            sites=self.sites,
            rounds=ROUNDS,
            seconds=self.seconds / max(len(self.methods), 1),
            data_dir=data_dir,
        )

    @property
    def shaped(self) -> ShapedLink:
        """Link between the sites."""
        return parse_link(self.link, self.rtt)

    @property
    def missing(self) -> str | None:
        """Reason why this machine cannot shape the link; None if it can."""
        return what_is_missing(self.shaped, self.sites)

    def run(self, context: Context) -> dict[str, Any]:
        """Measures, in one step of progress."""
        context.steps(1)
        found = {"skipped": self.missing} if self.missing else self._measured(context.data_dir)
        context.advance()
        return found

    def _measured(self, data_dir: Path) -> dict[str, Any]:
        plan = self.plan(data_dir)
        results = bench(plan, [self.shaped], sys.argv, lambda *_: None, shown=False)
        steps = {timing.method: _step(timing) for timing in results.links[0].timings}
        return {"steps": steps, "notes": results.notes}


def _step(timing: Timing) -> dict[str, Any]:
    return {
        "step_s": timing.median_s,
        "quartiles_s": list(timing.quartiles_s),
        "sent_bytes": timing.sent_bytes,
        "payload_bytes": timing.payload_bytes,
        "steps": sum(map(len, timing.rounds_s)),
    }


@dataclass(frozen=True, kw_only=True)
class StarWork(TrainingWork):
    """Runs the sites of a training as processes with networks of their own, and times their steps.

    Settings of a training that say how often it is tested are not used.

    Attributes:
        methods: Methods to time, instead of `method`.
        link, rtt: Line of each site.
        hub_rate: Rate of the hub's line.
        seconds: Approximate seconds for which each method is timed.
        cut_s: Seconds for which the line of the first site is down once in each method.
    """

    methods: tuple[str, ...]
    link: str
    rtt: str = "0ms"
    hub_rate: str = "1gbit"
    seconds: float = 10
    cut_s: float | None = None

    def __post_init__(self) -> None:
        """Checks every value, those of the training too."""
        super().__post_init__()
        for method in self.methods:
            attach_of(method, "methods")
        if not self.methods or {"pooled", "alone"}.intersection(self.methods):
            raise RecipeError("methods must be those of sites that exchange something")
        _ = self.shaped, parse_link(self.hub_rate)

    @property
    def shaped(self) -> ShapedLink:
        """Link of each site."""
        return parse_link(self.link, self.rtt)

    @property
    def missing(self) -> str | None:
        """Reason why this machine cannot shape the links; None if it can."""
        return what_is_missing(self.shaped, self.sites + 1)

    def plan(self, data_dir: Path) -> AroundHub:
        """Returns the settings for the benchmark."""
        return AroundHub(
            job=Job(**{one.name: getattr(self, one.name) for one in fields(Job)}),
            methods=self.methods,
            link=self.shaped,
            hub_rate=self.hub_rate,
            seconds=self.seconds,
            cut_s=self.cut_s or 0.0,
            data_dir=data_dir,
        )

    def run(self, context: Context) -> dict[str, Any]:
        """Measures, in one step of progress; returns "skipped" where the machine cannot."""
        context.steps(1)
        missing = self.missing
        found = {"skipped": missing} if missing else {"steps": self._measured(context.data_dir)}
        context.advance()
        return found

    def _measured(self, data_dir: Path) -> dict[str, dict[str, Any]]:
        return time_around_hub(self.plan(data_dir))


@dataclass(frozen=True, kw_only=True)
class SitesWork:
    """Plans a step. Bytes are exact, seconds those of sites like this machine.

    Attributes:
        workload, sites, link, methods: As `outergrad plan` has them.
        latency: Round-trip time.
        seconds: Seconds after which no further round of steps begins.
    """

    workload: str
    sites: int = at_least(2)
    link: str
    methods: tuple[str, ...]
    latency: str = "0ms"
    seconds: float = 10

    def __post_init__(self) -> None:
        """Refuses what cannot be planned."""
        if self.workload not in WORKLOADS:
            known = ", ".join(WORKLOADS)
            raise RecipeError(f"workload must be one of {known}, not {self.workload!r}")
        _ = self.question

    @property
    def question(self) -> Question:
        """Question for the planner."""
        return Question(
            model=self.workload,
            sites=self.sites,
            link=parse_link(self.link, self.latency, "latency"),
            methods=self.methods,
            seconds=self.seconds,
            buffers="local",  # as in trainings, which average them before a test
        )

    def run(self, context: Context) -> dict[str, Any]:
        """Plans steps, in one step of progress."""
        context.steps(1)
        planned = forecast(self.question, lambda _: None)
        context.advance()
        asked = [method for method in planned.methods if method.method in self.methods]
        steps = {method.method: _planned_step(planned, method) for method in asked}
        return {"steps": steps, "alone_s": planned.alone.compute_s.middle}


def _planned_step(planned: Forecast, method: Planned) -> dict[str, Any]:
    return {
        "step_s": method.seconds(planned.question.link).middle,
        "compute_s": method.compute_s.middle,
        "sent_bytes": sum(m.total.sent for m in method.last[-1].messages) / planned.question.sites,
        "wire_bytes": method.wire_bytes,
        "messages": method.messages,
    }


KINDS: dict[str, Callable[[Settings], Work]] = {
    "training": TrainingWork.of,
    "timing": partial(read, TimingWork),
    "sites": partial(read, SitesWork),
    "star": StarWork.of,
    "iterations": partial(read, IterationsWork),
    "selection": partial(read, SelectionWork),
    "audit": partial(read, AuditWork),
    "forward": partial(read, ForwardWork),
    "correction": partial(read, CorrectionWork),
    "gossip": partial(read, GossipWork),
    "pushing": partial(read, PushingWork),
    "drift": partial(read, DriftWork),
    "autospec": partial(read, AutospecWork),
    "rank-bounds": partial(read, RankBoundsWork),
    "coding": partial(read, CodingWork),
    "pruning": partial(read, PruningWork),
}
"""Functions that make the work of a task from its settings."""

TRAINED = ("training", "star")
"""Kinds that have the settings of a training."""
