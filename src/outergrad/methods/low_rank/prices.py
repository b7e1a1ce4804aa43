"""Bytes of a step, and the largest rank that a budget pays for in all layers alike."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from outergrad.core.cost import CostModel
from outergrad.core.owners import heaviest_share
from outergrad.core.payload import Form
from outergrad.core.step_size import Whole
from outergrad.core.types import Route, Slot, Unit
from outergrad.messages.wire import Piece, Preamble
from outergrad.methods.common import dense_bytes
from outergrad.methods.low_rank.cost import Sizes
from outergrad.methods.low_rank.settings import LowRankSettings

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
