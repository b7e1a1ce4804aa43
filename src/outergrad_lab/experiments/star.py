"""Tasks of kind "star": measured duration of training steps around a hub, on shaped links."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from outergrad.launch.errors import RecipeError
from outergrad.launch.links import ShapedLink, parse_link, what_is_missing
from outergrad_lab.bench.around_hub import AroundHub, time_around_hub
from outergrad_lab.experiments.task import Context
from outergrad_lab.experiments.training import TrainingWork
from outergrad_lab.peers.named import attach_of
from outergrad_lab.training.job import Job


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
