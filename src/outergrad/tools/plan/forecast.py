"""Forecast: bytes per layer, step times, and what can be said of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import outergrad as og
from outergrad.core.cost import CostModel
from outergrad.core.protocols import Method
from outergrad.launch.errors import RecipeError
from outergrad.launch.links import ShapedLink
from outergrad.step.buffers import Kind
from outergrad.tools.plan.comparison import DENSE, Comparison, Standing
from outergrad.tools.plan.layers import LayerPlan, Layers
from outergrad.tools.plan.measure import (
    Planned,
    Setting,
    Turn,
    busy_share,
    forms_gradients,
    is_exact,
    method_of,
    repeat,
)
from outergrad.tools.plan.network import Network, network_of
from outergrad.tools.plan.subject import Subject, check_subject, subject, try_step
from outergrad.tools.plan.verdict import (
    HIGHEST_BIT_PER_S,
    Look,
    Rates,
    how_to_tell_more,
    sentences,
    verdicts,
)


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
        methods: Names that `attach_of` knows, of outergrad's own. Dense is always among them.
        seconds: Time after which no further round of steps begins.
        buffers: How the sites share buffers that forward passes write to.

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
    buffers: Kind = "broadcast"

    def __post_init__(self) -> None:
        check_subject(self.model, self.rows)
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

    @property
    def compared(self) -> dict[str, Method]:
        """Methods by name, with dense, which all of them are compared to."""
        others = self.methods if DENSE in self.methods else (DENSE, *self.methods)
        return {name: method_of(name) for name in others}


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Result of a forecast.

    Attributes:
        question: The question.
        subject: The model and its batch.
        alone: Training without exchange.
        methods: Result of each method, dense among them.
        inspected: The model's layers.
        rounds: Rounds in which all of them had a turn.
        took_s: Seconds that these took.
    """

    question: Question
    subject: Subject
    alone: Planned
    methods: list[Planned]
    inspected: Layers
    rounds: int = 0
    took_s: float = 0.0

    @property
    def dense(self) -> Planned:
        """Result of sending whole gradients."""
        return self._named(DENSE)

    def _named(self, method: str) -> Planned:
        return next(one for one in self.methods if one.method == method)

    @cached_property
    def layers(self) -> list[LayerPlan]:
        """Bytes of each layer."""
        stats = {one.method: one.stats.layers for one in self.methods}
        return self.inspected.plans(self.question.compared, stats)

    @property
    def comparison(self) -> Comparison:
        """Figures that are shown."""
        standings = [self._standing(planned) for planned in self.methods]
        return Comparison.of(self.alone.compute_s, standings)

    def _standing(self, planned: Planned) -> Standing:
        return Standing(
            method=planned.method,
            exact=planned.exact,
            sent_bytes=planned.sent_bytes,
            compute_s=planned.compute_s,
            step_s=planned.seconds(self.question.link),
            learnt=planned.learnt,
        )

    def is_settled(self) -> bool:
        """True if more rounds would change no verdict."""
        return all(verdict.is_settled for verdict in verdicts(self.comparison))

    def rates(self, method: str) -> Rates:
        """Returns the links on which a method and dense differ for sure."""
        planned, low = self._named(method), self.question.link.rate_bit_per_s
        if low is None:
            return Rates()
        return Rates(
            _last(partial(self._is_faster, planned, self.dense), low),
            _first(partial(self._is_faster, self.dense, planned), low),
        )

    def _is_faster(self, one: Planned, other: Planned, rate_bit_per_s: float) -> bool:
        link = replace(self.question.link, rate_bit_per_s=rate_bit_per_s)
        return one.seconds(link).is_below(other.seconds(link))

    @property
    def verdict(self) -> list[str]:
        """Sentences on the methods: only what the shown figures support."""
        comparison = self.comparison
        found = sentences(comparison, self.rates, self.question.link)
        return [*found, *how_to_tell_more(comparison, self._look)]

    @property
    def _look(self) -> Look:
        return Look(
            rounds=self.rounds,
            took_s=self.took_s,
            allowed_s=self.question.seconds,
            busy=busy_share([self.alone, *self.methods]),
        )

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
            "rounds": self.rounds,
            "verdict": self.verdict,
            "fastest": {one.kind: one.as_dict() for one in verdicts(self.comparison)},
            "alone_s": self.alone.compute_s.bounds,
            "methods": {one.method: self._method_dict(one) for one in self.methods},
            "layers": [asdict(layer) for layer in self.layers],
        }

    def _method_dict(self, planned: Planned) -> dict[str, Any]:
        rates = self.rates(planned.method)
        return {
            "exact": planned.exact,
            "sent_bytes": planned.sent_bytes,
            "wire_bytes": planned.wire_bytes,
            "messages": planned.messages,
            "compute_s": planned.compute_s.bounds,
            "step_s": planned.seconds(self.question.link).bounds,
            "others_learn": planned.learnt,
            "dense_slower_to_bit_per_s": rates.dense_slower_to,
            "dense_faster_from_bit_per_s": rates.dense_faster_from,
        }


def _last(holds: Callable[[float], bool], low: float) -> float | None:
    """Highest rate up to which something holds; None if it does not at the lowest."""
    if not holds(low):
        return None
    return _border(lambda rate: not holds(rate), low)[0]


def _first(holds: Callable[[float], bool], low: float) -> float | None:
    """Lowest rate from which on something holds; None if it does not at the highest."""
    if not holds(HIGHEST_BIT_PER_S):
        return None
    return low if holds(low) else _border(holds, low)[1]


def _border(holds: Callable[[float], bool], low: float) -> tuple[float, float]:
    """Rates close to each other, at the second of which something begins to hold."""
    high = HIGHEST_BIT_PER_S
    if not holds(high):
        return high, high
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high


def forecast(question: Question, progress: Callable[[str], None]) -> Forecast:
    """Runs the forecast.

    Args:
        question: The question.
        progress: Called with the name of each method that has had its turn.

    Raises:
        RecipeError: The model cannot be imported or built, or a method does not fit it.
    """
    planned_for, methods = subject(question.model, question.rows), question.compared
    inspected, network = _layers(planned_for, question.network.cost), question.network
    alone = Planned("alone", True, network)
    planned = {
        name: Planned(name, is_exact(method), network, alone if forms_gradients(method) else None)
        for name, method in methods.items()
    }
    found = Forecast(
        question=question,
        subject=planned_for,
        alone=alone,
        methods=[*planned.values()],
        inspected=inspected,
    )
    setting = Setting(
        subject=planned_for, network=network, link=question.link, buffers=question.buffers
    )

    def measure(one: Planned, turn: Callable[[], Turn]) -> None:
        one.turns.append(turn())
        progress(one.method)

    turns = [partial(measure, alone, setting.alone)]
    turns += [
        partial(measure, planned[name], partial(setting.turn, name, method))
        for name, method in methods.items()
    ]
    began = time.perf_counter()
    rounds = repeat(turns, question.seconds, found.is_settled)
    return replace(found, rounds=rounds, took_s=time.perf_counter() - began)


def _layers(planned_for: Subject, cost: CostModel) -> Layers:
    try_step(planned_for)
    try:
        model = planned_for.model
        return Layers(model, cost, partial(planned_for.loss, model))
    except ValueError as error:
        raise RecipeError(f"--model {planned_for.name}: {error}") from error
