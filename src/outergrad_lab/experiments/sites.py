"""Tasks of kind "sites": planned cost of a step for a number of sites, found in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outergrad.launch.errors import RecipeError
from outergrad.launch.links import parse_link
from outergrad.tools.plan.forecast import Forecast, Question, forecast
from outergrad.tools.plan.measure import ROUNDS, Planned
from outergrad_lab.experiments.settings import at_least
from outergrad_lab.experiments.task import Context
from outergrad_lab.workloads import WORKLOADS


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
        )

    def run(self, context: Context) -> dict[str, Any]:
        """Plans steps, in a step of progress per method and round, and as many for no exchange."""
        context.steps(ROUNDS * (len({"dense", *self.methods}) + 1))
        planned = forecast(self.question, lambda _: context.advance())
        steps = {method.method: _step(planned, method) for method in planned.methods}
        return {"steps": steps, "alone_s": planned.alone.compute_s}


def _step(planned: Forecast, method: Planned) -> dict[str, Any]:
    messages = method.traces[-1].messages
    return {
        "step_s": planned.seconds(method),
        "compute_s": method.compute_s,
        "sent_bytes": sum(m.total.sent for m in messages) / planned.question.sites,
        "wire_bytes": method.wire_bytes,
        "messages": method.messages,
    }
