"""Measurements of the gradients in recorded steps."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from outergrad.capture.batch import SampledUse
from outergrad.core.payload import Arrived, Entries
from outergrad.core.types import Factors, Gradient, Part, Place, Slot
from outergrad.linalg.inner import inner, shared_directions
from outergrad.linalg.leading import effective_rank, leading_values, values_of_rows
from outergrad.linalg.outer import stack, widened
from outergrad.linalg.sample_products import squared_sample_norms
from outergrad.record.groups import GroupSpectra, Uses
from outergrad.record.recorders import warn

SPECTRUM = 16
"""Number of singular values that are recorded."""

_CANCELLING = 1e-7
"""Rounding error of a product's squared norm, relative to the product of its factors' ones."""

_ROUNDING = 1e-6
"""Relative rounding error of a squared norm."""


@dataclass
class Sums:
    """Squares and products over all matrices of a weight; None where not measured.

    Attributes:
        own: squared norm of this site's gradient.
        mean: squared norm of the mean gradient.
        both: inner product of these two.
        due: squared norm of what this site had to send: its gradient plus its residual.
        missing: squared norm of the part of that which it did not send.
        activations: squared norm of its activations.
        deltas: squared norm of its deltas.
        sigma: singular values of each matrix of the mean gradient, (G, K).
    """

    own: float | None = None
    mean: float | None = None
    both: float | None = None
    due: float | None = None
    missing: float | None = None
    activations: float | None = None
    deltas: float | None = None
    sigma: list[Tensor] = field(default_factory=list)

    def add(self, **terms: float) -> None:
        """Adds terms to the fields of these names."""
        for name, term in terms.items():
            before = getattr(self, name)
            setattr(self, name, term if before is None else before + term)

    def measured(self) -> dict[str, object]:
        """Returns fields of `events.Layer`, without those that were not measured."""
        norms = {
            "activation_norm": self.activations,
            "delta_norm": self.deltas,
            "gradient_norm": self._above_cancelling(self.own),
            "mean_norm": self.mean,
        }
        found: dict[str, object] = {n: _root(s) for n, s in norms.items() if s is not None}
        if self.due is not None and self.missing is not None:
            found["relative_error"] = _root(self.missing / self.due) if self.due else 0.0
        size = _root(norms["gradient_norm"] or 0.0) * _root(self.mean or 0.0)
        if self.both is not None and size != 0:
            cosine = self.both / size
            found["cosine"] = cosine if math.isnan(cosine) else min(max(cosine, -1.0), 1.0)
        if self.sigma:
            found |= self._spectrum()
        return found

    def _above_cancelling(self, square: float | None) -> float | None:
        """The square, but zero where rows cancel: rounding leaves a rest, of either sign."""
        if square is None or self.activations is None or self.deltas is None:
            return square
        return 0.0 if abs(square) < _CANCELLING * self.activations * self.deltas else square

    def _spectrum(self) -> dict[str, object]:
        falling = torch.cat([sigma_GK.flatten() for sigma_GK in self.sigma])
        falling = falling.sort(descending=True).values[:SPECTRUM]
        ranks_G = torch.cat([effective_rank(sigma_GK) for sigma_GK in self.sigma])
        return {
            "singular_values": tuple(falling.tolist()),
            "effective_rank": ranks_G.mean().item(),
        }


def _root(square: float) -> float:
    """Square root; 0 for a negative square, which rounding may leave."""
    return math.sqrt(square) if square > 0 else square * 0


class FactoredMean:
    """Mean gradient of few rows, measured by the Gram matrices of its factors."""

    def __init__(self, factors: Factors, scale: float) -> None:
        self._factors, self._scale = factors, scale
        d_GRO, a_GRI = widened(factors.d_GRO), widened(factors.a_GRI)
        self._deltas_GRR, self._activations_GRR = d_GRO @ d_GRO.mT, a_GRI @ a_GRI.mT

    @property
    def square(self) -> float:
        """Squared norm."""
        return (self._deltas_GRR * self._activations_GRR).sum().item() * self._scale**2

    @property
    def singular_values(self) -> Tensor:
        """Singular values in falling order, (G, at most R)."""
        most = min(self._factors.d_GRO.shape[2], self._factors.a_GRI.shape[2])
        return self._scale * values_of_rows(self._deltas_GRR, self._activations_GRR, most)

    def inner(self, own: Gradient) -> float:
        """Returns the inner product with another gradient."""
        return self._scale * inner(own, self._factors)


def squared_sum(gradient: Gradient, residual: Gradient | None) -> float:
    """Returns the squared norm of gradient plus residual."""
    square = inner(gradient, gradient)
    if residual is None:
        return square
    return square + 2 * inner(gradient, residual) + inner(residual, residual)


def above_rounding(missing: float, due: float) -> float:
    """Returns `missing`, but 0 if it may be a rounding error of the squared norm `due`."""
    return missing if missing > _ROUNDING * due else 0.0


def squared_loss(rows: Factors, arrives: Factors) -> float:
    """Returns the squared norm of `(D - D') A' + D (A - A')`: nothing large cancels in it."""
    of_deltas = Factors(rows.d_GRO - arrives.d_GRO, arrives.a_GRI)
    if rows.a_GRI.dim() == 1:  # ids are not encoded
        return inner(of_deltas, of_deltas)
    lost = stack([of_deltas, Factors(rows.d_GRO, rows.a_GRI - arrives.a_GRI)])
    return inner(lost, lost)


MOST_ROWS = 256
"""Rows of all sites up to which overlaps are measured; larger Gram matrices cost too much."""


class Overlaps:
    """Overlap of the rows of all sites in one step, by weight."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self.why: dict[str, str] = {}

    def clear(self) -> None:
        """Drops all overlaps, for a step that starts again."""
        self._sums.clear()
        self.why.clear()

    def add(self, slot: Slot, parts_S: Sequence[Arrived | None], rank: int) -> None:
        """Adds one product.

        Args:
            slot: the product.
            parts_S: each site's part; None where it has no rows.
            rank: rank of this site.
        """
        rows_S = [part.a_GRI if isinstance(part, Factors) else None for part in parts_S]
        own = rows_S[rank]
        others = [rows for site, rows in enumerate(rows_S) if site != rank and rows is not None]
        whole = sum(part.d_GRO.shape[1] for part in parts_S if isinstance(part, Factors))
        if any(part is not None and not isinstance(part, Factors) for part in parts_S):
            self.why[slot.weight] = "entries arrive, not rows"
        elif own is None:
            self.why[slot.weight] = "this site sent no rows"
        elif slot.lookup:
            self._sums[slot.weight].append(_ids(own, others))
        elif whole > MOST_ROWS:
            self.why[slot.weight] = f"more than {MOST_ROWS} rows arrive"
        else:
            none = own.new_zeros(own.shape[0], 0, own.shape[2])
            self._sums[slot.weight].append(shared_directions(own, torch.cat([none, *others], 1)))

    def measured(self, name: str) -> dict[str, object]:
        """Returns the overlap as a field of `events.Layer`; empty where it is not known."""
        if name in self.why or name not in self._sums:
            return {}
        squares, count = map(sum, zip(*self._sums[name], strict=True))
        return {"duplicates": squares / count if count else 0.0}


def _ids(own_R: Tensor, others: Sequence[Tensor]) -> tuple[float, float]:
    """Number of this site's ids that others have, and of all; ids are orthogonal directions."""
    if not others:
        return 0.0, float(len(own_R))
    return float(torch.isin(own_R, torch.cat([*others])).sum()), float(len(own_R))


TIMES = 3.0
"""A sample is an outlier if its norm is above this multiple of the median."""
MOST = 5
"""Maximum number of outliers reported for each weight."""


class SampleNorms:
    """Norms of samples in one step, by weight."""

    def __init__(self) -> None:
        self._squares_B: dict[str, Tensor] = {}
        self._slots: defaultdict[str, list[Slot]] = defaultdict(list)
        self.why: dict[str, str] = {}

    def clear(self) -> None:
        """Drops all norms, for a step that starts again."""
        for of in (self._squares_B, self._slots, self.why):
            of.clear()

    def add(self, slot: Slot, uses: Uses, scale: float) -> None:
        """Adds the rows of one product.

        Args:
            slot: the product.
            uses: its uses in this step.
            scale: factor by which this site's gradient is multiplied.
        """
        name, others = slot.weight, self._slots[slot.weight]
        others.append(slot)
        use = uses[0] if len(uses) == 1 else None
        if any(slot.overlaps(other) for other in others[:-1]):
            self.why[name] = "several products add up to it"
        elif len(uses) > 1:
            self.why[name] = "its layer was used several times"
        elif not isinstance(use, SampledUse) or not use.is_told:
            self.why[name] = "which sample each row is of is not known"
        else:
            self._add(slot, use, scale)

    def _add(self, slot: Slot, use: SampledUse, scale: float) -> None:
        (here, part), total = next(iter(use.parts(slot).items())), use.samples.total
        squares_B = scale**2 * squared_sample_norms(here._replace(bias=None), part, total)
        before_B = self._squares_B.get(slot.weight)
        if before_B is not None and len(before_B) != total:
            self.why[slot.weight] = "its products see different numbers of samples"
            return
        self._squares_B[slot.weight] = squares_B if before_B is None else before_B + squares_B

    def measured(self, name: str) -> dict[str, object]:
        """Returns the norms as fields of `events.Layer`; empty where they are not known."""
        if name in self.why or name not in self._squares_B:
            return {}
        norms_B = self._squares_B[name].sqrt()
        norm, places = median_and_outliers(norms_B)
        found = norms_B[places].tolist()
        about = {"samples": len(norms_B), "sample_norm": norm}
        return {**about, "outliers": tuple(places), "outlier_norms": tuple(found)}


def median_and_outliers(norms_B: Tensor) -> tuple[float, list[int]]:
    """Returns the median, and the indices of at most `MOST` norms above `TIMES` it, largest first.

    Norms that are not finite are outliers. Of an even number of norms the median is the lower
    middle one.
    """
    sizes_B = torch.where(norms_B.isfinite(), norms_B, torch.inf)
    median = sizes_B.median()
    largest = sizes_B.topk(min(MOST, len(sizes_B)))
    is_out = (largest.values > TIMES * median) | largest.values.isinf()
    return median.item(), largest.indices[is_out].tolist()


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

    def reading(
        self, seconds: float, *, by_sample: bool = False, by_group: GroupSpectra | None = None
    ) -> Reading:
        """Returns a reading of one step, which measures as many parameters as fit in a time.

        Parameters take turns. At least one is measured; all are at the first time, when their
        durations are not known.

        Args:
            seconds: time to spend in this step.
            by_sample: True to measure norms of samples, too.
            by_group: takes singular values by group; None if nobody asks for them.
        """
        left, later = seconds, set[str]()
        for place, (name, cost) in enumerate(self._seconds.items()):
            left -= cost
            if left < 0 and place:
                later.add(name)
        return Reading(self, later, by_sample=by_sample, by_group=by_group)

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
        by_group: takes singular values by group; None if nobody asks for them.

    Attributes:
        uses_of: returns the uses of a slot in the step, as they were captured.
    """

    uses_of: Callable[[Slot], Uses] = staticmethod(lambda slot: ())

    def __init__(
        self,
        gauge: Gauge,
        later: Collection[str],
        *,
        by_sample: bool = False,
        by_group: GroupSpectra | None = None,
    ) -> None:
        self._gauge, self.later, self._another_turn = gauge, later, frozenset(later)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._slots: defaultdict[str, dict[Place, Slot]] = defaultdict(dict)
        self._own: dict[Place, Factors] = {}
        self._mean: dict[Place, FactoredMean] = {}
        self._sparse: set[Place] = set()
        self.sums: defaultdict[str, Sums] = defaultdict(Sums)
        self.overlaps = Overlaps()
        self.by_sample, self.by_group = SampleNorms() if by_sample else None, by_group

    def forget(self) -> None:
        """Drops all measurements, for a step that starts again."""
        for of in (self._slots, self._own, self._mean, self._sparse, self.sums, self.seconds):
            of.clear()
        self.overlaps.clear()
        for by in self._by_rows.values():
            by.clear()

    @property
    def _by_rows(self) -> dict[str, SampleNorms | GroupSpectra]:
        """Measurements of this site's rows that recorders ask for, by the figure of each."""
        by = {"sample_norm": self.by_sample, "group_rows": self.by_group}
        return {figure: one for figure, one in by.items() if one is not None}

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
        for by in self._by_rows.values() if name not in self.later else ():
            found |= by.measured(name)
        return found | {"unmeasured": dict(self._unmeasured(name, found)) or None}

    def _unmeasured(self, name: str, found: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yields figures of a parameter's rows that are not known, each with the reason."""
        figures = [("duplicates", self.overlaps.why, "single sites' rows do not arrive")]
        usual = "its rows were not captured"
        figures += [(figure, by.why, usual) for figure, by in self._by_rows.items()]
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
        """Adds what is asked of the rows of a captured product, times `scale`."""
        for by in self._by_rows.values():
            by.add(slot, self.uses_of(slot), scale)

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
