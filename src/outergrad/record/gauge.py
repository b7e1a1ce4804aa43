"""Measurements of the gradients in recorded steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from torch import Tensor

from outergrad.core.payload import Arrived, Entries
from outergrad.core.types import Factors, Gradient, Part, Place, Slot
from outergrad.linalg.inner import inner
from outergrad.linalg.leading import leading_values
from outergrad.linalg.outer import stack
from outergrad.record.by_sample import SampleNorms, Uses
from outergrad.record.overlaps import Overlaps
from outergrad.record.recorders import warn
from outergrad.record.sums import (
    SPECTRUM,
    FactoredMean,
    Sums,
    above_rounding,
    squared_loss,
    squared_sum,
)


def whole(name: str, mean: Tensor) -> list[Slot]:
    """Returns a parameter without known slots as one matrix; a vector has one row."""
    outputs = mean.shape[0] if mean.dim() > 1 else 1
    return [Slot("", name, outputs, mean.numel() // max(outputs, 1))]


def matrix_of(slot: Slot, gradient: Tensor) -> Tensor:
    """Returns the slot's part of a gradient, (G, O, I)."""
    start, stop = slot.weight_rows or (0, gradient.shape[0] if gradient.dim() else 1)
    part = gradient if gradient.dim() == 0 else gradient[start:stop]
    return part.reshape(slot.groups, slot.outputs, slot.inputs)


def used_rows(table_1IO: Tensor) -> Tensor:
    """Returns the rows of a table that are not zero, which have the same singular values."""
    used = table_1IO[0].any(dim=1)
    return table_1IO[:, used] if bool(used.any()) else table_1IO[:, :1]


_NOT_ROWS = "its rows are not all of the gradient, or could not be measured"
_FEW = 64
"""Number of rows up to which a mean gradient's factors cost less to measure than the matrix."""


class Gauge:
    """Measures the gradients of a model, step by step.

    Args:
        matrices: for each weight, the matrices to decompose. Another parameter of two dimensions or
            more counts as one matrix.
        tables: weights of which few rows have a gradient.
    """

    def __init__(self, matrices: Mapping[str, Sequence[Slot]], tables: Collection[str]) -> None:
        self.matrices, self.tables = matrices, tables
        self.starts: dict[Place, Tensor] = {}
        self._seconds: dict[str, float] = {}

    def reading(self, seconds: float, *, by_sample: bool = False) -> Reading:
        """Returns a reading of one step, which measures as many parameters as fit in a time.

        Parameters take turns. At least one is measured; all are at the first time, when their
        durations are not known.

        Args:
            seconds: time to spend in this step.
            by_sample: True to measure norms of samples, too.
        """
        left, later = seconds, set[str]()
        for place, (name, cost) in enumerate(self._seconds.items()):
            left -= cost
            if left < 0 and place:
                later.add(name)
        return Reading(self, later, by_sample=by_sample)

    def took(self, seconds: Mapping[str, float]) -> None:
        """Stores how long each parameter took, and moves it to the end of the queue."""
        for name, cost in seconds.items():
            self._seconds.pop(name, None)
            self._seconds[name] = cost


def _in_turn(measure: Callable[..., None]) -> Callable[..., None]:
    """Skips parameters left for later, and times the others; errors become warnings."""

    @wraps(measure)
    def timed(self: Reading, of: Part | Slot | str, *args: Any, **kwargs: Any) -> None:
        slot = of.slot if isinstance(of, Part) else of
        name = slot.weight if isinstance(slot, Slot) else slot
        if name in self.later:
            return
        began = time.perf_counter()
        try:
            measure(self, of, *args, **kwargs)
        except Exception as error:  # a failed measurement must not end the training
            self.leave_out(name)
            warn(f"{name!r} was not measured: {error!r}")
        self.seconds[name] += time.perf_counter() - began

    return timed


class Reading:
    """Measurements of one step; buckets report to it what they send and receive.

    Args:
        gauge: keeps values from one reading to the next.
        later: parameters that are not measured in this step.
        by_sample: True to measure the norms of samples, too.

    Attributes:
        uses_of: returns the uses of a slot in the step, as they were captured.
    """

    uses_of: Callable[[Slot], Uses] = staticmethod(lambda slot: ())

    def __init__(self, gauge: Gauge, later: Collection[str], *, by_sample: bool = False) -> None:
        self._gauge, self.later, self._another_turn = gauge, later, frozenset(later)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._slots: defaultdict[str, dict[Place, Slot]] = defaultdict(dict)
        self._own: dict[Place, Factors] = {}
        self._mean: dict[Place, FactoredMean] = {}
        self._sparse: set[Place] = set()
        self.sums: defaultdict[str, Sums] = defaultdict(Sums)
        self.overlaps = Overlaps()
        self.by_sample = SampleNorms() if by_sample else None

    def forget(self) -> None:
        """Drops all measurements, for a step that starts again."""
        for of in (self._slots, self._own, self._mean, self._sparse, self.sums, self.seconds):
            of.clear()
        self.overlaps.clear()
        if self.by_sample is not None:
            self.by_sample.clear()

    def leave_out(self, name: str) -> None:
        """Stops measuring a parameter whose gradient is incomplete, or whose measurement failed."""
        self.later = {*self.later, name}
        self.sums.pop(name, None)

    def end(self) -> None:
        """Reports the durations to the gauge at the end of the step."""
        self._gauge.took(self.seconds)

    def measured(self, name: str) -> dict[str, Any]:
        """Returns a parameter's measurements, as fields of `events.Layer`."""
        found = self.sums[name].measured() | self.overlaps.measured(name)
        if self.by_sample is not None:
            found |= self.by_sample.measured(name)
        return found | {"unmeasured": dict(self._unmeasured(name, found)) or None}

    def _unmeasured(self, name: str, found: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yields figures of a parameter's rows that are not known, each with the reason."""
        figures = [("duplicates", self.overlaps.why, "single sites' rows do not arrive")]
        if self.by_sample is not None:
            figures.append(("sample_norm", self.by_sample.why, "its rows were not captured"))
        for figure, why, usual in figures:
            if figure in found:
                continue
            if name in self._another_turn:
                yield figure, "another step's turn"
            else:
                yield figure, _NOT_ROWS if name in self.later else why.get(name, usual)

    # -- what is sent -----------------------------------------------------------------------------

    @_in_turn
    def sent_all(self, part: Part, rows: Factors, arrives: Factors | None) -> None:
        """Measures a gradient that this site sends as exact factors.

        Args:
            part: the gradient.
            rows: its factors.
            arrives: the factors as the others decode them, if they are encoded.
        """
        slot, gradient, _ = part
        self._take(slot, gradient, None if slot.lookup else rows)
        lost = 0.0 if arrives is None else squared_loss(rows, arrives)
        self.sums[slot.weight].add(due=inner(rows, rows), missing=lost)

    @_in_turn
    def sent(self, part: Part, residual: Gradient | None, arrives: Gradient) -> None:
        """Measures a gradient that this site sends approximately.

        Args:
            part: the gradient.
            residual: unsent remainder of earlier gradients (error feedback).
            arrives: the approximation, as the others decode it.
        """
        slot, gradient, _ = part
        self._take(slot, gradient)
        due, both = squared_sum(gradient, residual), inner(gradient, arrives)
        if residual is not None:
            both += inner(residual, arrives)
        missing = due - 2 * both + inner(arrives, arrives)
        self.sums[slot.weight].add(due=due, missing=above_rounding(missing, due))

    @_in_turn
    def sketched(
        self, slot: Slot, gradient: Gradient, residual: Gradient | None, z_GIK: Tensor
    ) -> None:
        """Measures this site's addend of a sum of sketches `dWᵀ P`, with orthonormal P."""
        self._take(slot, gradient)
        due = squared_sum(gradient, residual)
        missing = above_rounding(due - inner(z_GIK, z_GIK), due)
        self.sums[slot.weight].add(due=due, missing=missing)

    @_in_turn
    def samples(self, slot: Slot, scale: float) -> None:
        """Adds the norms of samples of a captured product, times `scale`."""
        if self.by_sample is not None:
            self.by_sample.add(slot, self.uses_of(slot), scale)

    def _take(self, slot: Slot, gradient: Gradient, rows: Factors | None = None) -> None:
        """Stores this site's gradient, as `rows` if given, and the norms of its factors."""
        own = rows or gradient
        if isinstance(own, Factors):
            self._own[slot.place] = own
        if isinstance(gradient, Factors):
            sums = self.sums[slot.weight]
            sums.add(deltas=_square(gradient.d_GRO))
            if not slot.lookup:
                sums.add(activations=_square(gradient.a_GRI))

    # -- what is received -------------------------------------------------------------------------

    @_in_turn
    def record_mean(self, slot: Slot, parts: Sequence[Arrived], scale: float) -> None:
        """Stores the mean gradient of a slot: `scale` times the sum of `parts`."""
        if not parts:
            return
        self._slots[slot.weight][slot.place] = slot
        if any(isinstance(part, Entries) for part in parts):
            self._sparse.add(slot.place)
        factors = [part for part in parts if isinstance(part, Factors)]
        few = sum(part.d_GRO.shape[1] for part in factors) <= _FEW
        if slot.lookup or len(factors) < len(parts) or not few:
            return  # the matrix itself is less work
        rows = stack([Factors(*part[:2]) for part in factors])
        self._mean[slot.place] = FactoredMean(rows, scale)

    @_in_turn
    def overlap(self, slot: Slot, parts_S: Sequence[Arrived | None], rank: int) -> None:
        """Measures which share of this site's rows other sites have, too.

        Args:
            slot: the product.
            parts_S: each site's part of it.
            rank: rank of this site.
        """
        self.overlaps.add(slot, parts_S, rank)

    @_in_turn
    def mean(self, name: str, own: Tensor | None, mean: Tensor) -> None:
        """Measures the mean gradient of a parameter.

        Args:
            name: full name of the parameter.
            own: this site's gradient, where it was formed.
            mean: the mean gradient.
        """
        used = [slot for slot in self._slots[name].values() if not slot.lookup]
        for slot in used or self._gauge.matrices.get(name) or whole(name, mean):
            formed_GOI = matrix_of(slot, mean)
            given = None if own is None else matrix_of(slot, own)
            self._compare(slot, self._own.get(slot.place, given), formed_GOI)
            if mean.dim() > 1:
                self.sums[name].sigma.append(self._spectrum(slot, formed_GOI))

    def _compare(self, slot: Slot, own: Gradient | None, formed_GOI: Tensor) -> None:
        rows, sums = self._mean.get(slot.place), self.sums[slot.weight]
        if own is not None:
            both = rows.inner(own) if rows else inner(own, formed_GOI)
            sums.add(own=inner(own, own), both=both)
        sums.add(mean=rows.square if rows else inner(formed_GOI, formed_GOI))

    def _spectrum(self, slot: Slot, formed_GOI: Tensor) -> Tensor:
        rows = self._mean.get(slot.place)
        if rows is not None:
            return rows.singular_values[:, :SPECTRUM]
        if slot.weight in self._gauge.tables:
            formed_GOI = used_rows(formed_GOI)
        # Sparse parts have other entries in every step: no start vectors from the step before.
        starts = {} if slot.place in self._sparse else self._gauge.starts
        sigma_GK, start = leading_values(formed_GOI, SPECTRUM, starts.get(slot.place))
        if start is not None:
            starts[slot.place] = start
        return sigma_GK


def _square(t: Tensor) -> float:
    row_11N = t.flatten()[None, None]
    return inner(row_11N, row_11N)
