"""Layer events for recorders: bytes, times and measures of each layer in a step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from outergrad.buckets.bucket import StepContext
from outergrad.core.model import Compressors, Model
from outergrad.core.types import Slot
from outergrad.events import Layer
from outergrad.linalg.inner import inner
from outergrad.record.gauge import Reading, whole
from outergrad.record.stats import LayerStats, Stats

_LINEAR = ("gradient_norm", "mean_norm", "residual_norm", "delta_norm", "sample_norm")
"""Measures that scale in proportion to the gradient."""
_LINEAR_EACH = ("singular_values", "outlier_norms")
"""Measures of several numbers each that scale in proportion to the gradient."""
_LINEAR_BY_GROUP = ("group_gradient", "group_deltas")
"""Measures of several numbers per group that scale in proportion to the gradient."""
_OF_SAMPLES = {"samples": 0, "sample_norm": None, "outliers": (), "outlier_norms": None}
_OF_GROUPS = dict.fromkeys(
    ("group_rows", "group_gradient", "group_activations", "group_deltas"), None
)


class LayerEvents:
    """Builder of the layer events of a step.

    Args:
        rank: this site.
        model: what is shared.
        compressors: of the model's units.
        passes_of: returns the number of passes over which a parameter's gradient is a mean.
    """

    def __init__(
        self, rank: int, model: Model, compressors: Compressors, passes_of: Callable[[str], int]
    ) -> None:
        self._rank, self._model, self._compressors = rank, model, compressors
        self._passes_of = passes_of

    def alone(self, step: int, reading: Reading) -> Iterator[Layer]:
        """Yields the events of a single site's step, in which nothing travels."""
        grads = {name: p.grad for name, p in self._model.params.items()}
        for name, grad in grads.items():
            if grad is not None:
                reading.mean(name, grad, grad)
                measured = reading.measured(name) | {"relative_error": 0.0}
                yield self._event(step, name, LayerStats("dense"), measured)

    def shared(self, context: StepContext, stats: Stats) -> Iterator[Layer]:
        """Yields an event for all that travelled, and for measured weights of replayed blocks.

        The bytes of such weights are in the event of their block.
        """
        reading, residuals, waited_s = context.reading, self._residuals(), context.waited_s()
        blocks = {block.block.name: block.block.params for block in context.blocks}
        for name, layer in stats.layers.items():
            params = blocks.get(name, (name,))
            event = self._shared(context, name, layer, params, residuals)
            yield replace(event, wait_s=max((waited_s.get(p, 0.0) for p in params), default=0.0))
            for weight in blocks.get(name, ()):
                if reading is not None and reading.sums[weight].sigma:
                    yield self._shared(context, weight, LayerStats("replayed"), (), residuals)

    def _shared(
        self,
        context: StepContext,
        name: str,
        layer: LayerStats,
        params: Sequence[str],
        residuals: Mapping[str, float],
    ) -> Layer:
        header, reading = context.header, context.reading
        uses = [header.uses[k] for source, k in context.index.items() if source.label == name]
        by_rows = layer.travels in ("factors", "low rank")
        found: dict[str, Any] = reading.measured(name) if reading is not None else {}
        if layer.travels == "dense":
            found["relative_error"] = 0.0
        if name in residuals:
            found["residual_norm"] = residuals[name]
        if "effective_rank" in found:
            of_step = by_rows and name not in residuals
            found["rank_bound"] = self._rank_bound(context, name, of_step=of_step)
        return self._event(
            header.step,
            name,
            layer,
            _mean_over(self._passes_of(next(iter(params), name)), found),
            rows=max((use.rows for use in uses), default=0) if by_rows else 0,
        )

    def _event(
        self,
        step: int,
        name: str,
        layer: LayerStats,
        measured: Mapping[str, Any],
        *,
        rows: int = 0,
    ) -> Layer:
        about: dict[str, Any] = {"rank": self._rank, "step": step, "layer": name, "rows": rows}
        return Layer(**about, wait_s=0.0, **vars(layer), **measured)

    def _rank_bound(self, context: StepContext, name: str, *, of_step: bool) -> float:
        """Returns the largest rank of a weight's mean gradient, averaged over its matrices.

        Args:
            context: the step.
            name: the weight.
            of_step: whether all that arrives is of the rows of this step, of all sites.
        """
        of_units = (m for unit in self._model.units for m in unit.matrices if m.weight == name)
        matrices = list(of_units) or whole(name, self._model.params[name])
        bounds = [(min(m.outputs, m.inputs), m) for m in matrices]
        if of_step:
            bounds = [(min(most, _rows_of_all(context, m)), m) for most, m in bounds]
        return sum(most * m.groups for most, m in bounds) / sum(m.groups for m in matrices)

    def _residuals(self) -> dict[str, float]:
        """Returns the norm of the residual (error feedback) of each weight."""
        squares: defaultdict[str, float] = defaultdict(float)
        for unit in self._model.units:
            for matrix in unit.matrices:
                residual = self._compressors[unit].residual(matrix)
                if residual is not None:
                    squares[matrix.weight] += inner(residual, residual)
        return {name: math.sqrt(max(square, 0.0)) for name, square in squares.items()}


def asked(event: Layer, *, samples: bool, groups: bool) -> Layer:
    """Returns the event for a recorder, without single samples and groups if it did not ask."""
    nothing: dict[str, Any] = {}
    nothing |= {} if samples else _OF_SAMPLES
    nothing |= {} if groups else _OF_GROUPS
    if not nothing:
        return event
    why = {name: why for name, why in (event.unmeasured or {}).items() if name not in nothing}
    return replace(event, unmeasured=why or None, **nothing)


def _mean_over(passes: int, sums: dict[str, Any]) -> dict[str, Any]:
    """Divides measures by the passes of `every=k`: what is measured is their sum, not the mean."""
    if passes == 1:
        return sums
    scaled = {name: sums[name] / passes for name in _LINEAR if name in sums}
    for name in _LINEAR_EACH:
        if name in sums:
            scaled[name] = tuple(number / passes for number in sums[name])
    for name in _LINEAR_BY_GROUP:
        if name in sums:
            scaled[name] = {c: tuple(v / passes for v in of) for c, of in sums[name].items()}
    return sums | scaled


def _rows_of_all(context: StepContext, matrix: Slot) -> float:
    """Returns the rows of all sites in the products of a matrix; infinite if not all are known."""
    places = [
        k for slot, k in context.index.items() if isinstance(slot, Slot) and slot.overlaps(matrix)
    ]
    uses = [header.uses[k] for header in context.headers for k in places]
    known = bool(uses) and all(use.tapped or not use.rows for use in uses)
    return sum(use.rows for use in uses) if known else math.inf
