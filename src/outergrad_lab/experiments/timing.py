"""Tasks of kind "timing": measured duration of a step on a shaped link."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outergrad.launch.errors import RecipeError
from outergrad.launch.links import ShapedLink, parse_link, what_is_missing
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.results import Timing
from outergrad_lab.bench.run import bench
from outergrad_lab.experiments.settings import at_least
from outergrad_lab.experiments.task import Context

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
