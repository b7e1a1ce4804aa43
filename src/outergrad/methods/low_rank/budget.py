"""Budget of bytes per step, divided among layers by the energy per byte of their next triplet."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from outergrad.core.owners import owners
from outergrad.core.types import Inheritance, Place, Route, Slot, StateDict, Unit, place_name
from outergrad.methods.low_rank.energies import Energies
from outergrad.methods.low_rank.prices import Prices, sides
from outergrad.methods.low_rank.settings import LowRankSettings
from outergrad.methods.low_rank.sharing import shared_out

_AT_FIRST = 64
"""Triplets of a layer that a division looks at before it looks at more."""
_GROWS = 16
"""Steps in which layers may still get many more triplets than they have."""
_SHARES = 64
"""Number of parts of the budget that are tried where layers have owners."""


class Budget:
    """Number of triplets that every site sends of each layer: at least one, within the budget.

    A site divides its bytes by the spectra of the steps before: the next triplet goes to the layer
    where its energy per byte is largest. It does so after 1, 2, 4, 8 and so on up to `share_every`
    steps, and then after every `share_every` steps. Ranks are constant in between, which saves new
    plans. It announces the result in the following step, and all sites apply it from the step
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
        self._more = np.zeros((len(self._matrices), 0))
        """Bytes that a site sends for each further triplet of each matrix."""
        self._rows: dict[tuple[Place, int], int] = {}
        self._owners: dict[Place, int] = {}
        self._told: dict[tuple[Place, int], int] = {}
        self._heard: dict[tuple[Place, int], int] = {}
        self._wanted: dict[Place, int] = {}
        self._energies = Energies(settings.share_every)
        alike = {m.place: np.arange(1.0, min(sides(m)) + 1) ** -2 for m in self._matrices}
        self._first = self._shared_out(alike)
        if prices.way == Route.TWO_WAY:
            self._first = self._common({p: sites * rows for p, rows in self._first.items()})
            self._owners = self._shares(self._first)

    @property
    def grows(self) -> bool:
        """True in the first steps, in which layers that need more triplets still get them."""
        return self._energies.steps < _GROWS

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
        self._energies.note(slot.place, sigma_GR)

    def commit(self, *, applied: bool) -> None:
        """Ends a step; if it is applied, adopts announced ranks and divides the budget if due."""
        if applied and len(self._told) == len(self._matrices) * self._sites:
            self._settle(self._told)
        if self._energies.commit(applied=applied) and self._is_due(self._energies.steps):
            self._wanted = self._shared_out(self._energies.means)
        self._told = {}

    def _is_due(self, steps: int) -> bool:
        """True if the budget is divided after this step: often at first, while layers grow."""
        every = self._settings.share_every
        return steps % every == 0 if steps >= every else steps & (steps - 1) == 0

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

    def _shared_out(self, energies: Mapping[Place, np.ndarray]) -> dict[Place, int]:
        """Returns the rows of each layer that have most energy per byte."""
        if not self._matrices:
            return {}
        behind = [energies.get(m.place, np.zeros(0))[1 : min(sides(m))] for m in self._matrices]
        longest, most = max(map(len, behind)), _AT_FIRST
        while True:
            width = min(most, longest)
            known_LK = np.stack([_wide(e[:width], width) for e in behind])
            more_L = shared_out(known_LK, self._costs_of_more(width), self._spare)
            if width == longest or more_L.max() < width:
                break
            most *= 2
        return {m.place: 1 + more for m, more in zip(self._matrices, more_L.tolist(), strict=True)}

    def _costs_of_more(self, width: int) -> np.ndarray:
        """Returns the bytes that a site sends for each of `width` further triplets, (L, width)."""
        for k in range(self._more.shape[1], width):
            more = [self._cost(m, k + 2) - self._cost(m, k + 1) for m in self._matrices]
            self._more = np.column_stack([self._more, self._prices.copies * np.array(more)])
        return self._more[:, :width]

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
            **self._energies.state(),
        }

    def load(self, inheritance: Inheritance) -> None:
        """Continues from a saved state; starts anew at another number of sites: costs differ."""
        self._rows, self._wanted = {}, {}
        self._energies = Energies(self._settings.share_every)
        if not inheritance.same_sites:
            return
        own, place_of = inheritance.like["own"], inheritance.place_of
        self._wanted = {place_of[name]: rows for name, rows in own["wanted_rows"].items()}
        self._energies.load(own, place_of)
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


def _wide(energies: np.ndarray, width: int) -> np.ndarray:
    """Appends zeros: what is not known gets no bytes."""
    return np.pad(energies, (0, width - len(energies)))
