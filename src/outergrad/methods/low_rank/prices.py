"""Bytes of a step, and the largest rank that a budget pays for in all layers alike."""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from outergrad.core.coding import Codecs, nbytes, without_drops
from outergrad.core.cost import CostModel, Whole
from outergrad.core.owners import heaviest_share
from outergrad.core.payload import Form
from outergrad.core.types import Route, Slot, Unit
from outergrad.messages.wire import Piece, Preamble
from outergrad.methods.common import FLOAT_BYTES, dense_bytes, row_bytes, tied_in_use, used_slots
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


_RIDERS_BYTES = 1 << 18
"""Largest size of dense gradients that may travel with rows to each site, bytes."""
_PADDING = 64
"""Bytes to align what travels with rows, and to count sites in a sum."""


class Prices:
    """Upper bounds of the bytes that a site sends in a step: every message is at its longest.

    Args:
        units: Units of the method.
        whole: Sizes of everything that a step sends.
        cost: Cost model of the transport.
        form: Form of the rows.
        way: Route of low rank: gathered, or through owners.
    """

    def __init__(
        self, units: Sequence[Unit], whole: Whole, cost: CostModel, form: Form, way: Route
    ) -> None:
        self._units, self._whole, self._cost, self._form = units, whole, cost, form
        self.way = way

    def dense(self) -> int:
        """Returns the bytes of all-reducing all gradients."""
        return self._cost.all_reduce(sum(self._whole.params.values())).sent

    def triplets(self, settings: LowRankSettings, matrix: Slot, rows: int) -> int:
        """Returns the bytes of `rows` triplets of a matrix, sent once."""
        dtype, codecs = self._whole.dtypes[matrix.weight], Sizes(settings).codecs(matrix)
        return Piece(matrix, rows, dtype, None, codecs, self._form).nbytes

    @property
    def copies(self) -> float:
        """Number of times that a site sends a byte of triplets, where owners have equal shares."""
        own = self._cost.copies
        return own if self.way == Route.GATHER else 1 + (own - 1) / self._cost.sites

    def sent(self, sizes: Mapping[Any, int]) -> int:
        """Returns the bytes that the busiest site sends of triplets or vectors of these sizes.

        Through owners a site sends once what others own, and to all others what it has merged.
        """
        if self.way == Route.GATHER:
            return self._cost.copies * sum(sizes.values())
        heaviest = int(heaviest_share(sizes, self._cost.sites))
        return sum(sizes.values()) + (self._cost.copies - 1) * heaviest

    def low_rank(self, settings: LowRankSettings) -> list[Unit]:
        """Returns the units that are fewer bytes at low rank than dense, at the settings' rank."""
        sizes = Sizes(settings)
        return [
            unit
            for unit in self._units
            if sizes.low_rank(unit, self._cost, self.way) * settings.min_ratio
            < dense_bytes(unit, self._cost)
        ]

    def at(self, settings: LowRankSettings, rows: int | None = None) -> int:
        """Returns the bytes of a step with `rows` triplets per layer, or the settings' rank."""
        matrices = [matrix for unit in self.low_rank(settings) for matrix in unit.matrices]
        wanted = settings.rank if rows is None else rows
        of = {m: self.triplets(settings, m, min(wanted, *sides(m))) for m in matrices}
        return self.sent(of) + self.besides(settings)

    def besides(self, settings: LowRankSettings) -> int:
        """Returns the bytes of a step without its triplets."""
        units, copies = self.low_rank(settings), self._cost.copies
        along = {n: self._whole.params[n] for unit in units for n in unit.vectors}
        inside = {name for unit in units for name in unit.params}
        outside = {n: size for n, size in self._whole.params.items() if n not in inside}
        count, preambles = self._messages(settings, units)
        control = copies * self._whole.control
        if self.way == Route.GATHER:
            vectors = sum(along.values()) + _PADDING * len(units)
            return control + copies * (preambles + vectors) + self._rest(outside)
        receivers = self._cost.sites - 1 + copies  # of both rounds
        padding = _PADDING * count * len({self._whole.dtypes[n] for n in {**along, **outside}})
        apart = self.sent(along) + self._summed(outside)
        fits = sum(outside.values()) <= _RIDERS_BYTES
        vectors = max(apart, self.sent({**along, **outside})) if fits else apart
        return control + receivers * (preambles + padding) + vectors

    def _messages(self, settings: LowRankSettings, units: Sequence[Unit]) -> tuple[int, int]:
        """Returns the number of messages, and the bytes of their preambles."""
        matrices = [matrix for unit in units for matrix in unit.matrices]
        rows = sum(rows_in_messages(settings, matrix) for matrix in matrices)
        vectors = 2 * sum(self._whole.params[name] for unit in units for name in unit.vectors)
        count = 1 + (rows + vectors) // settings.bucket_bytes
        own = Preamble.nbytes(sum(len(unit.params) for unit in units), len(matrices))
        return count, own + (count - 1) * Preamble.nbytes(1, 1)

    def _rest(self, sizes: Mapping[str, int]) -> int:
        """Returns the bytes of dense parameters, with rows or in all-reduces, whichever is more."""
        nbytes, summed = sum(sizes.values()) + _PADDING * bool(sizes), self._summed(sizes)
        return max(summed, self._cost.copies * nbytes) if nbytes <= _RIDERS_BYTES else summed

    def _summed(self, sizes: Mapping[str, int]) -> int:
        return self._cost.all_reduce(sum(sizes.values()) + _PADDING * bool(sizes)).sent


def settled(settings: LowRankSettings, prices: Prices, matrices: Sequence[Slot]) -> LowRankSettings:
    """Returns the settings with the largest rank that fits the budget in all layers alike.

    Raises:
        ValueError: One triplet of each layer does not fit the budget.
    """
    nbytes = settings.budget_bytes(prices.dense())
    most = max((min(sides(matrix)) for matrix in matrices), default=1)

    # single triplets, too: shares of owners may be less equal then
    def most_bytes(rank: int) -> int:
        return max(prices.at(_at(settings, rank), rows) for rows in (1, None))

    fits = bisect_right(range(1, most + 1), nbytes, key=most_bytes)
    if not fits:
        least = most_bytes(1)
        raise ValueError(
            f"RankDAD: budget={settings.budget!r} is {nbytes} bytes per step; one triplet of each "
            f"layer, and what travels besides, is {least}: use that or more, or fewer bits"
        )
    return _at(settings, fits)


def _at(settings: LowRankSettings, rank: int) -> LowRankSettings:
    """Replaces the rank without another check of the user's settings, unlike `replace`."""
    found = copy.copy(settings)
    object.__setattr__(found, "rank", rank)
    return found


def rows_in_messages(settings: LowRankSettings, slot: Slot) -> int:
    """Returns the bytes by which messages are filled, equal in all steps however ranks change."""
    return min(settings.rank, *sides(slot)) * Sizes(settings).row(slot)


def sides(slot: Slot) -> tuple[int, int]:
    """Returns O and I: a matrix has no more triplets than the smaller of them."""
    return slot.outputs, slot.inputs
