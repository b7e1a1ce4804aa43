"""Estimates of bytes and of time, by which low rank chooses the route of a unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from outergrad.core.coding import Codecs, nbytes, without_drops
from outergrad.core.cost import CostModel
from outergrad.core.types import Route, Slot, Unit
from outergrad.methods.common import FLOAT_BYTES, row_bytes, tied_in_use, used_slots
from outergrad.methods.low_rank.settings import LowRankSettings

_ENOUGH = 1.1
"""Ratio to the fastest route up to which one of smaller error is preferred: measured links and
estimates are no more exact."""

_THIN = 4
"""Cost of a multiplication with a thin matrix, relative to one of full matrices, on a CPU."""

_RECOMPUTED = 3
"""One in this many of the products of a gradient is saved where gates are computed again: GRU and
LSTM on a CPU (`benchmarks/recurrent.py`)."""

WAYS = (Route.GATHER, Route.TWO_WAY, Route.REDUCE)
"""Routes in the order of their error: gathered triplets have rank S R, merged ones the best R of
these; sketches follow the mean gradient from step to step."""


class Sizes:
    """Encoded bytes that a site sends to one other site, comparable between routes."""

    def __init__(self, settings: LowRankSettings) -> None:
        self._settings = settings

    def codecs(self, slot: Slot) -> Codecs:
        """Returns a slot's codecs; rows by id have no memory, so error feedback allows no drops."""
        if slot.vector:
            return self._settings.vector_codecs
        wire = self._settings.codecs
        return without_drops(wire) if slot.lookup and self._settings.keeps_loss else wire

    def row(self, slot: Slot) -> int:
        """Returns the bytes of one row."""
        return row_bytes(slot, self.codecs(slot))

    def triplets(self, matrix: Slot) -> float:
        """Returns the bytes of triplets at full rank: a layer of adaptive rank keeps its route.

        Where sides take turns, it is the mean of two steps.
        """
        both = min(self._settings.rank, matrix.outputs, matrix.inputs) * self.row(matrix)
        return both / 2 if self._settings.alternates else both

    def low_rank(self, unit: Unit, cost: CostModel, way: Route) -> float:
        """Returns the bytes of triplets or sketches and of vectors, as if they were gathered.

        All-gathered factors cost a site (S - 1) times their size; a ring all-reduce, and the two
        rounds through owners, cost 2 (S - 1) / S times it.
        """
        if not unit.matrices:
            return math.inf
        triplets = sum(map(self.triplets, unit.matrices))
        numel = unit.dense_numel - sum(matrix.numel for matrix in unit.matrices)
        return (triplets + FLOAT_BYTES * numel) * cost.share(1, way)

    def exact(self, unit: Unit, rows_SK: Sequence[Sequence[int]]) -> float:
        """Returns the bytes of exact factors on the site with most; inf if they are not sent."""
        if not unit.slots or tied_in_use(unit, rows_SK) or not self._settings.taps:
            return math.inf
        by_id = any(slot.lookup for slot in unit.slots)
        if self._settings.budget is not None or (self._settings.tolerance and not by_id):
            return math.inf
        return max(self._exact_of_site(unit, rows_K) for rows_K in rows_SK)

    def cheaper_from_factors(self, slot: Slot, rows: int) -> bool:
        """True if two products with factors cost less than forming the gradient and two with it.

        A convolution's patches would have to be cut out first, which costs more than all that. A
        recurrent layer computes its gates again, so less is saved.
        """
        if slot.patches:
            return False
        width = slot.outputs + slot.inputs
        thin = 2 * _THIN * (self._settings.rank + self._settings.memory_rank)
        size = slot.outputs * slot.inputs
        saved = rows * size // (_RECOMPUTED if slot.recomputed else 1)
        return thin * rows * width < saved + thin * size

    def _exact_of_site(self, unit: Unit, rows_K: Sequence[int]) -> int:
        used = used_slots(unit, rows_K)
        factors = sum(exact_rows(slot, rows) * self.row(slot) for slot, rows in used)
        return factors + self.biases([slot for slot, _ in used])

    def biases(self, slots: Sequence[Slot]) -> int:
        """Returns the bytes of the bias gradients that travel with rows."""
        codecs = self._settings.vector_codecs
        return sum(nbytes(codecs, (1, s.groups * s.outputs)) for s in slots if s.bias is not None)


def exact_rows(slot: Slot, rows: int) -> int:
    """Returns the number of rows that can represent `rows` rows exactly."""
    return rows if slot.lookup else min(rows, slot.outputs, slot.inputs)


def best_way(seconds: Mapping[Route, float]) -> Route:
    """Returns the route with the smallest error among those about as fast as the fastest."""
    limit = _ENOUGH * min(seconds.values())
    return next(way for way in WAYS if seconds.get(way, math.inf) <= limit)
