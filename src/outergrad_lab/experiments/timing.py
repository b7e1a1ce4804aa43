"""Tasks of kind "timing": how long a step takes on a link that is really so slow."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from outergrad.launch.errors import RecipeError
from outergrad.launch.links import Link, parse_link, what_is_missing
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.results import Results, Timing
from outergrad_lab.bench.run import bench
from outergrad_lab.experiments.settings import names, positive_number, whole_number, with_defaults
from outergrad_lab.experiments.task import Context, Settings

NEEDED = ("workload", "sites", "link", "methods")
DEFAULTS = {"rtt": "0ms", "seconds": 20, "optional": False}
ROUNDS = 10
"""Blocks of steps of a method, at most: fast methods need no more to be known well."""


@dataclass(frozen=True)
class Timed:
    """Times steps of several methods in turns, each site a process in a network of its own.

    Settings: `workload`, `sites`, `link` and `methods` as `outergrad bench` has them, `rtt`,
    `seconds`, which all methods share; and `optional`: a machine that cannot shape links leaves
    an optional task out, with ``{"skipped": why}`` as what it found.
    """

    def check(self, settings: Settings) -> None:
        """Looks at settings before anything runs.

        Raises:
            RecipeError: One is not allowed, or this machine lacks what the link needs.
        """
        read = with_defaults(settings, DEFAULTS, NEEDED)
        plan, link = _plan(read, Context(data_dir=Plan.data_dir)), _link(read)
        missing = what_is_missing(link, plan.sites)
        if missing and not read["optional"]:
            raise RecipeError(f"{missing}; or make the task optional: true")

    def run(self, settings: Settings, context: Context) -> dict[str, Any]:
        """Measures; one step of progress.

        Raises:
            RecipeError: This machine lacks something.
            SiteError: A site failed.
        """
        read = with_defaults(settings, DEFAULTS, NEEDED)
        self.check(settings)
        context.steps(1)
        plan, link = _plan(read, context), _link(read)
        missing = what_is_missing(link, plan.sites)
        found = {"skipped": missing} if missing else _measured(plan, link)
        context.advance()
        return found


TIMING = Timed()


def _plan(read: Settings, context: Context) -> Plan:
    methods = names(read, "methods")
    return Plan(
        workload=read["workload"],
        methods=methods,
        sites=whole_number(read, "sites", 2),
        rounds=ROUNDS,
        seconds=positive_number(read, "seconds") / max(len(methods), 1),
        data_dir=context.data_dir,
    )


def _link(read: Settings) -> Link:
    return parse_link(str(read["link"]), str(read["rtt"]))


def _measured(plan: Plan, link: Link) -> dict[str, Any]:
    results = bench(plan, [link], sys.argv, lambda *_: None, shown=False)
    return {"steps": _steps(results), "notes": results.notes}


def _steps(results: Results) -> dict[str, Any]:
    return {timing.method: _step(timing) for timing in results.links[0].timings}


def _step(timing: Timing) -> dict[str, Any]:
    return {
        "step_s": timing.median_s,
        "quartiles_s": list(timing.quartiles_s),
        "sent_bytes": timing.sent_bytes,
        "payload_bytes": timing.payload_bytes,
        "steps": sum(map(len, timing.rounds_s)),
    }
