"""Tasks of kind "sites": what a step would cost among so many sites, found in one process.

Bytes are exact, seconds those of sites like this machine. Settings: `workload`, `sites`, `link` and
`methods` as `outergrad plan` has them, `latency`, and `seconds`, after which no further round of
steps begins.
"""

from __future__ import annotations

from typing import Any

from outergrad.launch.errors import RecipeError
from outergrad.launch.links import parse_link
from outergrad.tools.plan.forecast import Forecast, Question, forecast
from outergrad.tools.plan.measure import ROUNDS, Planned
from outergrad_lab.experiments.settings import names, positive_number, whole_number, with_defaults
from outergrad_lab.experiments.task import Context, Kind, Settings
from outergrad_lab.workloads import WORKLOADS

NEEDED = ("workload", "sites", "link", "methods")
DEFAULTS = {"latency": "0ms", "seconds": 10}


def _question(settings: Settings) -> Question:
    read = with_defaults(settings, DEFAULTS, NEEDED)
    if read["workload"] not in WORKLOADS:
        known = ", ".join(WORKLOADS)
        raise RecipeError(f"workload must be one of {known}, not {read['workload']!r}")
    return Question(
        model=read["workload"],
        sites=whole_number(read, "sites", 2),
        link=parse_link(str(read["link"]), str(read["latency"]), "latency"),
        methods=names(read, "methods"),
        seconds=positive_number(read, "seconds"),
    )


def _run(settings: Settings, context: Context) -> dict[str, Any]:
    """Plans; a step of progress per method and round, and as many more for no exchange."""
    question = _question(settings)
    context.steps(ROUNDS * (len({"dense", *question.methods}) + 1))
    planned = forecast(question, lambda _: context.advance())
    steps = {method.method: _step(planned, method) for method in planned.methods}
    return {"steps": steps, "alone_s": planned.alone.compute_s}


def _step(planned: Forecast, method: Planned) -> dict[str, Any]:
    messages = method.traces[-1].messages
    return {
        "step_s": planned.seconds(method),
        "compute_s": method.compute_s,
        "sent_bytes": sum(message.mean_bytes for message in messages),
        "wire_bytes": method.wire_bytes,
        "messages": method.messages,
    }


SITES = Kind(check=_question, run=_run)
