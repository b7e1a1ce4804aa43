"""Routes of low-rank units, decided by bytes, and use of their factors, decided by time."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

from outergrad.comm.cost import cost_of
from outergrad.comm.cost import seconds as seconds_of
from outergrad.core.compressor import Compressor
from outergrad.core.cost import CostModel
from outergrad.core.owners import heaviest_share
from outergrad.core.reasons import AutoWay
from outergrad.core.transport import Capability
from outergrad.core.types import Link, Route, Slot, Unit
from outergrad.methods.common import dense_bytes, tied_in_use
from outergrad.methods.low_rank.budget import Budget, stands
from outergrad.methods.low_rank.cost import WAYS, Sizes, best_way
from outergrad.methods.low_rank.settings import LowRankSettings
from outergrad.methods.low_rank.vectors import Vectors

_GATHER_SITES = 2
"""Largest number of sites between which "auto" gathers: no more bytes than to reduce, and one round
less."""


class LowRankRouting(Compressor):
    """Routing of `LowRankCompressor`."""

    _settings: LowRankSettings
    _sizes: Sizes
    _vectors: Vectors
    _budget: Budget | None = None
    _sums: bool
    """True if sketches may be summed: not if codecs drop numbers or vectors have codecs."""
    _owns: bool = True
    """True if layers may have owners, for which the transport needs an all-to-all."""

    # -- route of low rank, for the whole session -------------------------------------------------

    def settle(self, cost: CostModel, capabilities: Set[Capability]) -> None:
        """Stores the cost model, and whether the all-to-all that owners need is there."""
        super().settle(cost, capabilities)
        self._owns = Capability.ALL_TO_ALL in capabilities

    def wants_link(self, sites: int) -> bool:
        """True if the link decides the route; a budget, or two sites, always gather by default."""
        free = self._settings.reduce == "auto" and self._settings.budget is None
        return free and sites > _GATHER_SITES

    def settle_reduce(self, units: Sequence[Unit], sites: int, link: Link) -> None:
        """Chooses the route that is fastest for the whole model."""
        can = {Route.GATHER: True, Route.TWO_WAY: self._owns, Route.REDUCE: self._sums}
        ways = [way for way in WAYS if can[way]]
        model = cost_of(self, sites)
        sent_bytes = {way: self._sent_bytes(units, sites, way) for way in ways}
        seconds = {way: seconds_of(model, way, n, link) for way, n in sent_bytes.items()}
        way = best_way(seconds)
        others = tuple((other, s) for other, s in seconds.items() if other != way)
        self.auto_way = AutoWay(way=way, seconds=seconds[way], others=others, link=link)

    def _sent_bytes(self, units: Sequence[Unit], sites: int, way: Route) -> float:
        """Returns the bytes that the busiest site sends in a step, including dense units."""
        cost = cost_of(self, sites)
        nbytes, merged = 0.0, dict[Slot, float]()
        for unit in units:
            low_rank, dense = self._low_rank_bytes(unit, sites, way), dense_bytes(unit, cost)
            pays = low_rank * self._settings.min_ratio < dense
            nbytes += (sites - 1) * (low_rank if pays else dense)
            merged.update({m: self._sizes.triplets(m) for m in unit.matrices if pays})
        if way == Route.TWO_WAY:  # an owner sends (S - 2) times more of its share than the others
            unevenness = heaviest_share(merged, sites) - sum(merged.values()) / sites
            nbytes += (sites - 2) * unevenness
        return nbytes

    # -- route of a unit ------------------------------------------------------------------------

    def route(self, unit: Unit, rows_SK: Sequence[Sequence[int]], *, tapped: bool) -> Route:
        """Returns GATHER for exact factors if nothing is smaller, else low rank if small enough."""
        sites = len(rows_SK)
        if sites == 1:
            return Route.DENSE
        dense = dense_bytes(unit, cost_of(self, sites))
        low_rank = self._low_rank_bytes(unit, sites)
        if tapped and self._sizes.exact(unit, rows_SK) <= min(low_rank, dense):
            return Route.GATHER
        if low_rank * self._settings.min_ratio >= dense:
            return Route.DENSE
        return self._low_rank_route(sites)

    def taps(self, unit: Unit, rows_SK: Sequence[Sequence[int]]) -> bool:
        """True if exact factors are sent, or if triplets are found from factors in less time."""
        if not self._settings.taps or len(rows_SK) == 1 or tied_in_use(unit, rows_SK):
            return False
        if not self._vectors.fit(unit) or not self._budget_allows(unit):
            return False
        if self._sizes.exact(unit, rows_SK) <= self._low_rank_bytes(unit, len(rows_SK)):
            return self.route(unit, rows_SK, tapped=True) == Route.GATHER
        if self.route(unit, rows_SK, tapped=True) == Route.DENSE:
            return False
        if self._settings.keeps_all:
            return False
        if any(slot.lookup or self._settings.forms(slot) for slot in unit.slots):
            return False
        return all(
            self._sizes.cheaper_from_factors(slot, max(rows_S))
            for slot, rows_S in zip(unit.slots, zip(*rows_SK, strict=True), strict=True)
        )

    def _budget_allows(self, unit: Unit) -> bool:
        """True if factors fit a budget: it has matrices alone, and owners take no biases along."""
        if self._budget is None:
            return True
        return stands(unit) and self._settings.way != Route.TWO_WAY

    def break_even(self, unit: Unit, sites: int) -> float:
        """Returns the rows per slot from which dense is fewer bytes; inf where low rank pays."""
        dense = dense_bytes(unit, cost_of(self, sites))
        if sites == 1:
            return 0.0
        if self._low_rank_bytes(unit, sites) * self._settings.min_ratio < dense:
            return math.inf
        if not self._settings.taps or not unit.slots:
            return 0.0
        return (dense - self._sizes.biases(unit.slots)) / sum(map(self._sizes.row, unit.slots))

    def _resume_way(self, way: Route) -> None:
        """Keeps the route of a saved state."""
        self.auto_way = AutoWay(way=way)

    def _low_rank_route(self, sites: int) -> Route:
        if self._settings.way is not None:
            return self._settings.way
        if self._settings.budget is not None:
            return Route.GATHER
        if self.auto_way is not None:
            return self.auto_way.way
        if sites <= _GATHER_SITES:
            return Route.GATHER
        return Route.REDUCE if self._sums else Route.TWO_WAY

    def _low_rank_bytes(self, unit: Unit, sites: int, way: Route | None = None) -> float:
        way = way or self._low_rank_route(sites)
        return self._sizes.low_rank(unit, cost_of(self, sites), way)
