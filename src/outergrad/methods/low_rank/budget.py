"""A budget of bytes per step, shared out over the layers by what their next triplet is worth."""

from __future__ import annotations

import copy
import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch

from outergrad.core.cost import CostModel
from outergrad.core.payload import Form
from outergrad.core.step_size import Whole
from outergrad.core.types import Inheritance, Place, Route, Slot, StateDict, Unit, place_name
from outergrad.messages.wire import Piece, Preamble
from outergrad.methods.common import dense_bytes
from outergrad.methods.low_rank.cost import Sizes
from outergrad.methods.low_rank.settings import LowRankSettings

_RIDERS_BYTES = 1 << 18
"""Dense gradients up to so many bytes may go along with rows, to each site."""
_PADDING = 64
"""Bytes that align what goes along, and that count sites in a sum."""
_OFTEN = 16
"""Steps from one sharing out to the next, and steps that a mean of energies goes over: steps in
between are alike, which saves a plan of each."""


class Prices:
    """What a step costs a site in bytes, from above: as every message is at its longest.

    Args:
        units: of the method.
        whole: the rest.
        cost: of the transport.
        form: of the rows.
    """

    def __init__(self, units: Sequence[Unit], whole: Whole, cost: CostModel, form: Form) -> None:
        self._units, self._whole, self._cost, self._form = units, whole, cost, form

    def dense(self) -> int:
        """Of all gradients in all-reduces."""
        return self._cost.all_reduce(sum(self._whole.params.values())).sent

    def triplets(self, settings: LowRankSettings, matrix: Slot, rows: int) -> int:
        """So many of a matrix, to each site."""
        dtype, codecs = self._whole.dtypes[matrix.weight], Sizes(settings).codecs(matrix)
        piece = Piece(matrix, rows, dtype, None, codecs, self._form)
        return self._cost.copies * piece.nbytes

    def low_rank(self, settings: LowRankSettings) -> list[Unit]:
        """What is fewer bytes at low rank than dense, at the rank of the settings."""
        sizes = Sizes(settings)
        return [
            unit
            for unit in self._units
            if sizes.low_rank(unit, self._cost, Route.GATHER) * settings.min_ratio
            < dense_bytes(unit, self._cost)
        ]

    def at(self, settings: LowRankSettings, rows: int | None = None) -> int:
        """Of a step with so many triplets per layer; None for the rank of the settings."""
        units = self.low_rank(settings)
        matrices = [matrix for unit in units for matrix in unit.matrices]
        wanted = settings.rank if rows is None else rows
        triplets = (self.triplets(settings, m, min(wanted, *_sides(m))) for m in matrices)
        along = [name for unit in units for name in unit.vectors]
        inside = {name for unit in units for name in unit.params}
        outside = [name for name in self._whole.params if name not in inside]
        messages = self._messages(settings, units) + self._whole.control
        vectors = self._bytes(along) + _PADDING * len(units)
        return sum(triplets) + self._cost.copies * (messages + vectors) + self._rest(outside)

    def _messages(self, settings: LowRankSettings, units: Sequence[Unit]) -> int:
        """Of what stands before the rows."""
        matrices = [matrix for unit in units for matrix in unit.matrices]
        rows = sum(rows_in_messages(settings, matrix) for matrix in matrices)
        vectors = 2 * self._bytes([name for unit in units for name in unit.vectors])
        count = 1 + (rows + vectors) // settings.bucket_bytes
        own = Preamble.nbytes(sum(len(unit.params) for unit in units), len(matrices))
        return own + (count - 1) * Preamble.nbytes(1, 1)

    def _rest(self, names: Sequence[str]) -> int:
        """Of what travels dense, along with rows or in sums."""
        nbytes = self._bytes(names) + _PADDING * bool(names)
        summed = self._cost.all_reduce(nbytes).sent
        return max(summed, self._cost.copies * nbytes) if nbytes <= _RIDERS_BYTES else summed

    def _bytes(self, names: Sequence[str]) -> int:
        return sum(self._whole.params[name] for name in names)


class Budget:
    """How many triplets every site sends of each layer: at least one, and no byte too many.

    A site shares its bytes out by the spectra that it found in the steps before: the next triplet
    goes to the layer where its energy per byte is largest. It does so after 1, 2, 4, 8 and 16
    steps, and then after every 16. It tells the others so in the step that follows, and all go by
    it from the one after that on: if they were told of all layers, as what is told of some does
    not fit what was told of others.

    Args:
        settings: with the rank that fits all layers alike.
        matrices: of what travels at low rank.
        prices: of them.
        nbytes: the budget.
        sites: S.
    """

    def __init__(
        self,
        settings: LowRankSettings,
        matrices: Sequence[Slot],
        prices: Prices,
        nbytes: int,
        sites: int,
    ) -> None:
        self._settings, self._prices, self._sites = settings, prices, sites
        self._matrices = [matrix for matrix in matrices if not matrix.vector]
        self._spare = nbytes - prices.at(settings, rows=1)
        self._costs: dict[tuple[Slot, int], int] = {}
        self._rows: dict[tuple[Place, int], int] = {}
        self._told: dict[tuple[Place, int], int] = {}
        self._wanted: dict[Place, int] = {}
        self._energies: dict[Place, list[float]] = {}
        self._seen = 0
        self._found: dict[Place, list[float]] = {}
        alike = {m.place: [(k + 1.0) ** -2 for k in range(min(_sides(m)))] for m in matrices}
        self._first = self._shared_out(alike)

    def rows(self, slot: Slot, site: int) -> int:
        """What a site sends in this step."""
        return self._rows.get((slot.place, site), self._first.get(slot.place, 1))

    def wanted_rows(self, slot: Slot) -> int:
        """What this site would send, by the spectra of the last step."""
        return self._wanted.get(slot.place, self._first.get(slot.place, 1))

    def agree(self, slot: Slot, site: int, rows: int) -> None:
        """What a site has told in this step."""
        if not slot.vector:
            self._told[slot.place, site] = max(1, min(rows, *_sides(slot)))

    def note(self, slot: Slot, sigma_GR: torch.Tensor) -> None:
        """The singular values of a layer, all that were found."""
        self._found[slot.place] = sigma_GR.double().square().sum(dim=0).tolist()

    def commit(self, *, applied: bool) -> None:
        """The step is over."""
        if applied:
            if len(self._told) == len(self._matrices) * self._sites:
                self._rows = self._told
            self._seen += bool(self._found)
            share = 1 / max(1, min(self._seen, _OFTEN))
            for place, found in self._found.items():
                self._energies[place] = _mean(self._energies.get(place, ()), found, share)
            if self._found and _is_due(self._seen):
                self._wanted = self._shared_out(self._energies)
        self._told, self._found = {}, {}

    def _shared_out(self, energies: Mapping[Place, Sequence[float]]) -> dict[Place, int]:
        """Rows of each layer: the most energy that the bytes can bring, triplet by triplet."""
        rows, spare = {matrix.place: 1 for matrix in self._matrices}, self._spare
        of = [energies.get(matrix.place, ()) for matrix in self._matrices]
        pairs = zip(self._matrices, of, strict=True)
        waiting = [(-self._worth(m, 1, e), k) for k, (m, e) in enumerate(pairs)]
        heapq.heapify(waiting)
        while waiting:
            worth, k = heapq.heappop(waiting)
            matrix = self._matrices[k]
            more = self._more(matrix, rows[matrix.place])
            if not worth or more > spare:
                continue
            spare -= more
            rows[matrix.place] += 1
            heapq.heappush(waiting, (-self._worth(matrix, rows[matrix.place], of[k]), k))
        return rows

    def _worth(self, matrix: Slot, rows: int, energies: Sequence[float]) -> float:
        """Energy per byte of the triplet behind so many; nothing of one that is not known."""
        known = rows < min(len(energies), *_sides(matrix))
        return energies[rows] / max(1, self._more(matrix, rows)) if known else 0.0

    def _more(self, matrix: Slot, rows: int) -> int:
        """Bytes that one more costs."""
        return self._cost(matrix, rows + 1) - self._cost(matrix, rows)

    def _cost(self, matrix: Slot, rows: int) -> int:
        if (matrix, rows) not in self._costs:
            self._costs[matrix, rows] = self._prices.triplets(self._settings, matrix, rows)
        return self._costs[matrix, rows]

    # -- saved and loaded -----------------------------------------------------------------------

    def common_state(self) -> StateDict:
        """Per place, the rows that every site will send."""
        sites = range(self._sites if self._rows else 0)
        of = {m.place: [self._rows[m.place, site] for site in sites] for m in self._matrices}
        return {"sent_rows": {place_name(place): rows for place, rows in of.items() if rows}}

    def own_state(self) -> StateDict:
        """Per place, what this site would send, and the energies that it goes by."""
        return {
            "wanted_rows": {place_name(place): rows for place, rows in self._wanted.items()},
            "energies": {place_name(place): found for place, found in self._energies.items()},
            "seen": self._seen,
        }

    def load(self, inheritance: Inheritance) -> None:
        """Goes on, unless there are more or fewer sites: then rows cost something else."""
        self._rows, self._wanted, self._energies, self._seen = {}, {}, {}, 0
        if not inheritance.same_sites:
            return
        own, place_of = inheritance.like["own"], inheritance.place_of
        self._wanted = {place_of[name]: rows for name, rows in own["wanted_rows"].items()}
        self._energies = {place_of[name]: list(e) for name, e in own["energies"].items()}
        self._seen = own.get("seen", 0)
        self._rows = {
            (place_of[name], site): rows[old]
            for name, rows in inheritance.first["common"]["sent_rows"].items()
            for site, old in enumerate(inheritance.predecessors)
        }


def settled(settings: LowRankSettings, prices: Prices, matrices: Sequence[Slot]) -> LowRankSettings:
    """The settings with the largest rank that fits the budget in all layers alike.

    Raises:
        ValueError: not one triplet of each layer does.
    """
    nbytes = settings.budget_bytes(prices.dense())
    most = max((min(_sides(matrix)) for matrix in matrices), default=1)
    fits = bisect_right(range(1, most + 1), nbytes, key=lambda r: prices.at(_at(settings, r)))
    if not fits:
        least = prices.at(_at(settings, 1))
        raise ValueError(
            f"RankDAD: budget={settings.budget!r} is {nbytes} bytes per step; one triplet of each "
            f"layer, and what travels besides, is {least}: use that or more, or fewer bits"
        )
    return _at(settings, fits)


def _at(settings: LowRankSettings, rank: int) -> LowRankSettings:
    """As `replace`, which would check the user's settings once more."""
    found = copy.copy(settings)
    object.__setattr__(found, "rank", rank)
    return found


def stands(unit: Unit) -> bool:
    """Whether its layers are the matrices that a budget is shared out over, and none is by id."""
    places = {matrix.place for matrix in unit.matrices}
    return all(slot.place in places and not slot.lookup for slot in unit.slots)


def rows_in_messages(settings: LowRankSettings, slot: Slot) -> int:
    """Bytes by which messages are filled: the same in all steps, however bytes are shared out."""
    return min(settings.rank, *_sides(slot)) * Sizes(settings).row(slot)


def _mean(before: Sequence[float], found: Sequence[float], share: float) -> list[float]:
    """With so large a share of what was found now; where there is only one of both, that."""
    both = [old + share * (new - old) for old, new in zip(before, found, strict=False)]
    return [*both, *found[len(both) :], *before[len(both) :]]


def _is_due(steps: int) -> bool:
    """Whether to share out again after so many: often at first, when layers are still to grow."""
    return steps % _OFTEN == 0 if steps >= _OFTEN else steps & (steps - 1) == 0


def _sides(slot: Slot) -> tuple[int, int]:
    return slot.outputs, slot.inputs
