"""Forecast: bytes per layer, step times, and the link rate from which on dense is as fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import outergrad as og
from outergrad.core.cost import CostModel
from outergrad.launch.errors import RecipeError
from outergrad.launch.links import ShapedLink
from outergrad.tools.plan.layers import LayerPlan, Layers
from outergrad.tools.plan.measure import Planned, measure, method_of
from outergrad.tools.plan.network import Network, network_of
from outergrad.tools.plan.subject import Subject, subject, try_step

HIGHEST_BIT_PER_S = 100e9
"""Highest link rate that is considered."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Input of a forecast.

    Attributes:
        model: A key of `WORKLOADS`, or ``module:factory``.
        rows: Rows of a batch on one site; the workload's own if None.
        sites: Number of sites that share a step.
        link: Link of each site: to the others, or to a hub.
        transport: Transport between the sites: ``torch``, ``star``, ``module:factory``, or a
            function that is given the number of sites and returns a `CostModel`.
        hub_bit_per_s: Rate of the hub's line each way; None for no limit, or no hub.
        methods: Names that `attach_of` knows, of outergrad's own.
        seconds: Time after which no further round of steps begins.

    Raises:
        RecipeError: A value is not allowed; the error names its option.
    """

    model: str
    rows: int | None = None
    sites: int = 2
    link: ShapedLink
    transport: str | Callable[[int], CostModel] = "torch"
    hub_bit_per_s: float | None = None
    methods: tuple[str, ...]
    seconds: float = 60

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise RecipeError(f"--rows must be 1 or more, not {self.rows}")
        if self.sites < 2:
            raise RecipeError(f"--sites must be 2 or more, not {self.sites}")
        if self.link.loopback:
            raise RecipeError("--link loopback has no rate: use a rate such as 100mbit, or none")
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise RecipeError("--methods must name each method once, and at least one")
        for name in self.methods:
            method_of(name)
        _ = self.network

    @cached_property
    def network(self) -> Network:
        """Network between the sites."""
        return network_of(self.transport, self.sites, self.hub_bit_per_s)


@dataclass(frozen=True)
class Forecast:
    """Result of a forecast.

    Attributes:
        question: The question.
        subject: The model and its batch.
        layers: Bytes of each layer.
        alone: Training without exchange.
        methods: Result of each method, in the order of the question.
        dense: Result of sending whole gradients, even if the question did not name it.
    """

    question: Question
    subject: Subject
    layers: list[LayerPlan]
    alone: Planned
    methods: list[Planned]
    dense: Planned

    def seconds(self, planned: Planned) -> float:
        """Seconds of a step on the link."""
        return planned.seconds(self.question.link)

    def fastest(self, *, exact: bool) -> Planned | None:
        """The fastest method other than dense whose gradient is exact, or is not."""
        others = [m for m in self.methods if m is not self.dense and m.exact == exact]
        return min(others, key=self.seconds, default=None)

    def even_rate(self, planned: Planned) -> float | None:
        """Rate of the link, in bit/s, from which on dense is as fast; None if there is none.

        This is the link's own rate if dense is as fast already.
        """
        low, high = self.question.link.rate_bit_per_s, HIGHEST_BIT_PER_S
        if low is None or self._gain_s(planned, high) > 0:
            return None
        if self._gain_s(planned, low) <= 0:
            return low
        while high / low > 1.01:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self._gain_s(planned, middle) > 0 else (low, middle)
        return high

    def _gain_s(self, planned: Planned, rate_bit_per_s: float) -> float:
        link = replace(self.question.link, rate_bit_per_s=rate_bit_per_s)
        return self.dense.seconds(link) - planned.seconds(link)

    def as_dict(self) -> dict[str, Any]:
        """Returns the forecast in JSON types."""
        return {
            "outergrad": og.__version__,
            "model": self.subject.name,
            "rows": self.subject.rows,
            "sites": self.question.sites,
            "link": asdict(self.question.link),
            "transport": self.question.network.name,
            "hub_bit_per_s": self.question.hub_bit_per_s,
            "alone_s": self.alone.compute_s,
            "methods": {m.method: self._method_dict(m) for m in self.methods},
            "layers": [asdict(layer) for layer in self.layers],
        }

    def _method_dict(self, planned: Planned) -> dict[str, Any]:
        return {
            "exact": planned.exact,
            "sent_bytes": planned.sent_bytes,
            "wire_bytes": planned.wire_bytes,
            "messages": planned.messages,
            "compute_s": planned.compute_s,
            "step_s": self.seconds(planned),
            "dense_as_fast_from_bit_per_s": self.even_rate(planned),
        }


def forecast(question: Question, progress: Callable[[str], None]) -> Forecast:
    """Runs the forecast.

    Args:
        question: The question.
        progress: Called with the name of each method that has had its turn.

    Raises:
        RecipeError: The model cannot be imported or built, or a method does not fit it.
    """
    planned_for = subject(question.model, question.rows)
    names = question.methods if "dense" in question.methods else ("dense", *question.methods)
    methods = {name: method_of(name) for name in names}
    layers = _layers(planned_for, question.network.cost)
    alone, found = measure(
        planned_for, methods, question.network, question.link, question.seconds, progress
    )
    return Forecast(
        question=question,
        subject=planned_for,
        layers=layers.plans(methods, {m.method: m.stats.layers for m in found}),
        alone=alone,
        methods=[m for m in found if m.method in question.methods],
        dense=next(m for m in found if m.method == "dense"),
    )


def _layers(planned_for: Subject, cost: CostModel) -> Layers:
    try_step(planned_for)
    try:
        return Layers(planned_for.model, cost, planned_for.loss)
    except ValueError as error:
        raise RecipeError(f"--model {planned_for.name}: {error}") from error
