"""Budget of bytes per step, divided among layers by the energy per byte of their next triplet."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import torch

from outergrad.core.owners import owners
from outergrad.core.types import Inheritance, Place, Route, Slot, StateDict, Unit, place_name
from outergrad.methods.low_rank.prices import Prices, sides
from outergrad.methods.low_rank.settings import LowRankSettings

_NEAR = (1e-100, 1e100)
"""Range of singular values whose squares stay in the range of float64."""
_OFTEN = 16
"""Steps from one division of the budget to the next, and steps of the mean of energies: ranks are
constant in between, which saves new plans."""
_SHARES = 64
"""Number of parts of the budget that are tried where layers have owners."""


class Budget:
    """Number of triplets that every site sends of each layer: at least one, within the budget.

    A site divides its bytes by the spectra of the steps before: the next triplet goes to the layer
    where its energy per byte is largest. It does so after 1, 2, 4, 8 and 16 steps, and then after
    every 16. It announces the result in the following step, and all sites apply it from the step
    after that. They apply it only if every site has announced all of its layers, because ranks of
    different divisions do not fit together.

    Where layers have owners, all sites send the same number of triplets of a layer and receive as
    many merged ones: about the mean of what they would send. Where these numbers change, layers get
    other owners, so that all sites send about the same number of bytes.

    Args:
        settings: Settings, with the largest rank that fits all layers alike.
        matrices: Matrices of the units at low rank.
        prices: Bytes of their triplets.
        nbytes: Budget, bytes per step.
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
        self._vectors = [matrix for matrix in matrices if matrix.vector]
        self._spare = nbytes - prices.at(settings, rows=1)
        self._for_triplets = nbytes - prices.besides(settings)
        self._costs: dict[tuple[Slot, int], int] = {}
        self._rows: dict[tuple[Place, int], int] = {}
        self._owners: dict[Place, int] = {}
        self._told: dict[tuple[Place, int], int] = {}
        self._heard: dict[tuple[Place, int], int] = {}
        self._wanted: dict[Place, int] = {}
        self._energies: dict[Place, list[float]] = {}
        self._seen = 0
        self._unit: float | None = None
        """Unit of singular values that keeps their squares in range, from the first ones noted."""
        self._found: dict[Place, list[float]] = {}
        alike = {m.place: [(k + 1.0) ** -2 for k in range(min(sides(m)))] for m in matrices}
        self._first = self._shared_out(alike)
        if prices.way == Route.TWO_WAY:
            self._first = self._common({p: sites * rows for p, rows in self._first.items()})
            self._owners = self._shares(self._first)

    def rows(self, slot: Slot, site: int) -> int:
        """Returns the number of triplets that a site, or the merging owner, sends in this step."""
        return self._rows.get((slot.place, site), self._first.get(slot.place, 1))

    def owner(self, slot: Slot) -> int | None:
        """Returns the site that merges the slot in this step; None without owners."""
        return self._owners.get(slot.place)

    def wanted_rows(self, slot: Slot) -> int:
        """Returns the number of triplets that this site would send, by its last division."""
        return self._wanted.get(slot.place, self._first.get(slot.place, 1))

    def agree(self, slot: Slot, site: int, rows: int) -> None:
        """Records the number of triplets that a site has announced in this step."""
        if not slot.vector:
            self._told[slot.place, site] = max(1, min(rows, *sides(slot)))

    def note(self, slot: Slot, sigma_GR: torch.Tensor) -> None:
        """Records all singular values that were found of a layer."""
        sigma_GR = sigma_GR.double()
        if self._unit is None and (largest := sigma_GR.amax().item() if sigma_GR.numel() else 0.0):
            far = math.isfinite(largest) and not _NEAR[0] < largest < _NEAR[1]
            self._unit = largest if far else 1.0
        self._found[slot.place] = (sigma_GR / (self._unit or 1.0)).square().sum(dim=0).tolist()

    def commit(self, *, applied: bool) -> None:
        """Ends a step; if it is applied, adopts announced ranks and divides the budget if due."""
        if applied:
            if len(self._told) == len(self._matrices) * self._sites:
                self._settle(self._told)
            self._seen += bool(self._found)
            share = 1 / max(1, min(self._seen, _OFTEN))
            for place, found in self._found.items():
                self._energies[place] = _mean(self._energies.get(place, ()), found, share)
            if self._found and _is_due(self._seen):
                self._wanted = self._shared_out(self._energies)
        self._told, self._found = {}, {}

    def _settle(self, told: dict[tuple[Place, int], int]) -> None:
        if self._prices.way == Route.GATHER:
            self._rows = told
        elif told != self._heard:
            self._heard, sites = told, range(self._sites)
            places = [matrix.place for matrix in self._matrices]
            rows = self._common({p: sum(told[p, site] for site in sites) for p in places})
            self._rows = {(p, site): n for p, n in rows.items() for site in sites}
            self._owners = self._shares(rows)

    def _common(self, sums: Mapping[Place, int]) -> dict[Place, int]:
        """Returns rows that fit the busiest owner's budget: the mean over the sites, or nearly.

        Integers that all sites know give the same result on all of them.

        Args:
            sums: Rows that the sites would send, summed over the sites.
        """
        sites = self._sites

        def scaled(share: int) -> dict[Place, int]:
            return {p: max(1, rows * share // (_SHARES * sites)) for p, rows in sums.items()}

        parts = range(1, _SHARES + 1)
        found = scaled(bisect_left(parts, True, key=lambda share: not self._fit(scaled(share))))
        waiting = [(sites * found[p] - rows, k) for k, (p, rows) in enumerate(sums.items())]
        heapq.heapify(waiting)
        places = list(sums)
        while waiting:  # undo rounding where it took most
            more, k = heapq.heappop(waiting)
            place = places[k]
            if more < 0 and self._fit(found | {place: found[place] + 1}):
                found[place] += 1
                heapq.heappush(waiting, (more + sites, k))
        return found

    def _fit(self, rows: Mapping[Place, int]) -> bool:
        return self._prices.sent(self._sizes(rows)) <= self._for_triplets

    def _shares(self, rows: Mapping[Place, int]) -> dict[Place, int]:
        return owners(self._sizes(rows), self._sites)

    def _sizes(self, rows: Mapping[Place, int]) -> dict[Place, int]:
        """Returns the bytes of these rows of each layer, and of the vectors."""
        sizes = {m.place: self._cost(m, rows[m.place]) for m in self._matrices}
        return sizes | {vector.place: self._cost(vector, 1) for vector in self._vectors}

    def _shared_out(self, energies: Mapping[Place, Sequence[float]]) -> dict[Place, int]:
        """Returns the rows of each layer that have most energy, chosen triplet by triplet."""
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
        """Returns the energy per byte of the next triplet; 0 if it is not known."""
        known = rows < min(len(energies), *sides(matrix))
        return energies[rows] / max(1, self._more(matrix, rows)) if known else 0.0

    def _more(self, matrix: Slot, rows: int) -> float:
        """Returns the bytes that a site sends for one more triplet."""
        return self._prices.copies * (self._cost(matrix, rows + 1) - self._cost(matrix, rows))

    def _cost(self, matrix: Slot, rows: int) -> int:
        if (matrix, rows) not in self._costs:
            self._costs[matrix, rows] = self._prices.triplets(self._settings, matrix, rows)
        return self._costs[matrix, rows]

    # -- state of a checkpoint ------------------------------------------------------------------

    def common_state(self) -> StateDict:
        """Returns, by place, the rows that every site will send."""
        sites = range(self._sites if self._rows else 0)
        of = {m.place: [self._rows[m.place, site] for site in sites] for m in self._matrices}
        return {"sent_rows": {place_name(place): rows for place, rows in of.items() if rows}}

    def own_state(self) -> StateDict:
        """Returns, by place, the rows that this site would send and the mean energies."""
        return {
            "wanted_rows": {place_name(place): rows for place, rows in self._wanted.items()},
            "energies": {place_name(place): found for place, found in self._energies.items()},
            "seen": self._seen,
        }

    def load(self, inheritance: Inheritance) -> None:
        """Continues from a saved state; starts anew at another number of sites: costs differ."""
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
        if self._owners and self._rows:
            self._owners = self._shares({m.place: self._rows[m.place, 0] for m in self._matrices})


def stands(unit: Unit) -> bool:
    """True if the unit's slots are the matrices of a budget, and none is a lookup."""
    places = {matrix.place for matrix in unit.matrices}
    return all(slot.place in places and not slot.lookup for slot in unit.slots)


def _mean(before: Sequence[float], found: Sequence[float], share: float) -> list[float]:
    """Returns the mean with weight `share` for new values; unmatched values are kept."""
    both = [old + share * (new - old) for old, new in zip(before, found, strict=False)]
    return [*both, *found[len(both) :], *before[len(both) :]]


def _is_due(steps: int) -> bool:
    """True if the budget is divided after this step: often at first, while layers grow."""
    return steps % _OFTEN == 0 if steps >= _OFTEN else steps & (steps - 1) == 0
