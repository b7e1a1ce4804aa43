"""Tasks of kind "timing": how long a step takes on a link that is really so slow.

Steps of several methods take turns, each site a process in a network of its own. Settings:
`workload`, `sites`, `link` and `methods` as `outergrad bench` has them, `rtt`, `seconds`, which all
methods share; and `optional`: a machine that cannot shape links leaves an optional task out, with
``{"skipped": why}`` as what it found.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from outergrad.launch.errors import RecipeError
from outergrad.launch.links import ShapedLink, parse_link, what_is_missing
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.results import Timing
from outergrad_lab.bench.run import bench
from outergrad_lab.experiments.settings import names, positive_number, whole_number, with_defaults
from outergrad_lab.experiments.task import Context, Kind, Settings

NEEDED = ("workload", "sites", "link", "methods")
DEFAULTS = {"rtt": "0ms", "seconds": 20, "optional": False}
ROUNDS = 10
"""Blocks of steps of a method, at most: fast methods need no more to be known well."""


def _check(settings: Settings) -> None:
    """Refuses wrong settings, and a machine that lacks what the link needs."""
    read = with_defaults(settings, DEFAULTS, NEEDED)
    plan, link = _plan(read, Plan.data_dir), _link(read)
    missing = what_is_missing(link, plan.sites)
    if missing and not read["optional"]:
        raise RecipeError(f"{missing}; or make the task optional: true")


def _run(settings: Settings, context: Context) -> dict[str, Any]:
    """Measures; one step of progress."""
    _check(settings)
    read = with_defaults(settings, DEFAULTS, NEEDED)
    context.steps(1)
    plan, link = _plan(read, context.data_dir), _link(read)
    missing = what_is_missing(link, plan.sites)
    found = {"skipped": missing} if missing else _measured(plan, link)
    context.advance()
    return found


def _plan(read: Settings, data_dir: Path) -> Plan:
    methods = names(read, "methods")
    return Plan(
        workload=read["workload"],
        methods=methods,
        sites=whole_number(read, "sites", 2),
        rounds=ROUNDS,
        seconds=positive_number(read, "seconds") / max(len(methods), 1),
        data_dir=data_dir,
    )


def _link(read: Settings) -> ShapedLink:
    return parse_link(str(read["link"]), str(read["rtt"]))


def _measured(plan: Plan, link: ShapedLink) -> dict[str, Any]:
    results = bench(plan, [link], sys.argv, lambda *_: None, shown=False)
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


TIMING = Kind(check=_check, run=_run)
