"""Compressor of `RankDAD` and `PowerSGD`: route and payload of each layer, and error feedback."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace

import torch

from outergrad.comm.cost import cost_of, relays
from outergrad.comm.cost import seconds as seconds_of
from outergrad.core.coding import Codecs, drops
from outergrad.core.cost import CostModel, Whole
from outergrad.core.owners import heaviest_share
from outergrad.core.payload import EncodedRows
from outergrad.core.reasons import AutoWay
from outergrad.core.transport import Capability
from outergrad.core.types import (
    Factors,
    Gradient,
    Inheritance,
    Link,
    Part,
    Route,
    Slot,
    StateDict,
    Unit,
    tensors_of,
)
from outergrad.linalg.outer import formed
from outergrad.linalg.projections import OnDirections
from outergrad.methods.common import dense_bytes, tied_in_use
from outergrad.methods.low_rank.budget import Budget, stands
from outergrad.methods.low_rank.memory import (
    Memories,
    Memory,
    common_state,
    residual_of,
    saved,
)
from outergrad.methods.low_rank.merging import Merging, RowsAndBias, Vectors
from outergrad.methods.low_rank.prices import (
    WAYS,
    Prices,
    Sizes,
    best_way,
    exact_rows,
    rows_in_messages,
    settled,
)
from outergrad.methods.low_rank.settings import LowRankSettings
from outergrad.methods.low_rank.sketches import AlternatingSketches, GlobalSketches
from outergrad.methods.low_rank.triplets import Gathered
from outergrad.methods.residuals import Remembering

_GATHER_SITES = 2
"""Largest number of sites between which "auto" gathers: no more bytes than to reduce, and one round
less."""


class LowRankCompressor(Remembering[Memory]):
    """Sends triplets or sketches of gradients, or exact factors where they are fewer bytes."""

    takes_plain = True
    exact = False
    _memories: Memories
    _budget: Budget | None = None
    _owns: bool = True
    """True if layers may have owners, for which the transport needs an all-to-all."""

    def __init__(self, settings: LowRankSettings) -> None:
        self._build(settings)

    def _build(self, settings: LowRankSettings) -> None:
        self._settings, self.adapts = settings, settings.adapts
        self.bucket_bytes = settings.bucket_bytes
        self.wire, self.takes_vectors = settings.codecs, bool(settings.vectors)
        self._sums = not drops(settings.codecs) and not settings.vectors
        """True if sketches may be summed: not if codecs drop numbers or vectors have codecs."""
        self._sizes = Sizes(settings)
        self._memories = Memories(packs=settings.packs)  # pyright: ignore[reportIncompatibleVariableOverride]
        self._gathered = Gathered(settings, self._memories, self._budget)
        self._vectors = Vectors(settings, self._memories)
        if settings.vectors:
            self.form = RowsAndBias(settings.vector_codecs)
        sketches = AlternatingSketches if settings.alternates else GlobalSketches
        self.sketches = self._sketches = sketches(settings, self._memories)
        self.merger = Merging(settings, self._memories, self._vectors, self._budget)
        self.sums_formed = settings.sums
        self.sends_known = settings.alternates and not settings.tolerance
        if settings.reduce == "two_way":
            self.needs = frozenset({Capability.ALL_TO_ALL})

    def settle_budget(self, units: Sequence[Unit], whole: Whole) -> None:
        """Sets the largest rank that fits the budget in all layers alike, to choose routes by."""
        if self._settings.budget is None or self.cost is None or self.cost.sites == 1:
            return
        way = self._low_rank_route(self.cost.sites)
        prices = Prices(units, whole, self.cost, self.form, way)
        settings = settled(self._settings, prices, [m for unit in units for m in unit.matrices])
        matrices = [m for unit in prices.low_rank(settings) for m in unit.matrices]
        nbytes = settings.budget_bytes(prices.dense())
        self._budget = Budget(settings, matrices, prices, nbytes, self.cost.sites)
        self._build(settings)

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
        seconds = {way: self._seconds(units, sites, way, link) for way in ways}
        way = best_way(seconds)
        others = tuple((other, s) for other, s in seconds.items() if other != way)
        self.auto_way = AutoWay(way=way, seconds=seconds[way], others=others, link=link)

    def _seconds(self, units: Sequence[Unit], sites: int, way: Route, link: Link) -> float:
        """Estimates the seconds of the messages of a step at the busiest site, dense ones too."""
        cost = cost_of(self, sites)
        nbytes, merged = 0.0, dict[Slot, float]()
        for unit in units:
            low_rank, dense = self._low_rank_bytes(unit, sites, way), dense_bytes(unit, cost)
            pays = low_rank * self._settings.min_ratio < dense
            nbytes += (sites - 1) * (low_rank if pays else dense)
            merged.update({m: self._sizes.triplets(m) for m in unit.matrices if pays})
        if way != Route.TWO_WAY:
            return seconds_of(cost, way, nbytes, link)
        largest, whole = heaviest_share(merged, sites), sum(merged.values())
        nbytes += (sites - 2) * (largest - whole / sites)  # what an owner sends more than others
        if not relays(cost, largest, whole):
            return seconds_of(cost, way, nbytes, link)
        # It sends its share once instead, and a piece of all, but receives it from each site first.
        return seconds_of(cost, way, nbytes + 2 * largest, link) + link.delay_s

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

    # -- payload --------------------------------------------------------------------------------

    def sent_rows(self, slot: Slot, rows: int, site: int) -> int:
        """Returns all rows of an exact layer, else the triplets that the site has announced."""
        exact = exact_rows(slot, rows)
        if slot.vector or (slot.lookup and self._budget is None):
            return exact
        if self._budget is not None:
            return min(exact, self._budget.rows(slot, site))
        return self._gathered.sent_rows(slot, min(exact, self._settings.rank), site)

    def payload_bytes(self, slot: Slot, count: int) -> int:
        """Returns the bytes that fill messages, by a constant rank where ranks change.

        So layers share a message in all steps. A budget counts encoded bytes, for few messages.
        """
        if self._budget is not None:
            return rows_in_messages(self._settings, slot)
        if self._settings.tolerance and not slot.vector and not slot.lookup:
            count = min(self._settings.rank, slot.outputs, slot.inputs)
        return super().payload_bytes(slot, count) // (1 + self._settings.alternates)

    def known(self, unit: Unit, slot: Slot, device: torch.device) -> OnDirections | None:
        """Returns the directions that the last sum has left, where both sides take turns."""
        memory = self._memories[slot]
        if not self.sends_known or memory is None or memory.own or slot.groups > 1:
            return None
        columns = self._sketches.columns(slot)
        if memory.q_GIR.shape[2] < columns:  # fixed random ones would be in their place
            return None
        return OnDirections(memory.q_GIR[0, :, :columns], memory.left)

    def codecs(self, slot: Slot) -> Codecs:
        """Returns the codecs of a slot, without those whose loss could not be remembered."""
        return self._sizes.codecs(slot)

    def sends_bias(self, slot: Slot) -> bool:
        """True if the slot has a bias: triplets have no row sums to compute it from."""
        return slot.bias is not None

    def wanted_rows(self, slot: Slot) -> int:
        """Returns the rank that this site wants next, by the tolerance or by its budget."""
        return (self._budget or self._gathered).wanted_rows(slot)

    def agree(self, slot: Slot, site: int, rows: int) -> None:
        """Records the number of triplets that a site will send in the next step."""
        (self._budget or self._gathered).agree(slot, site, rows)

    def compress(self, parts: Sequence[Part]) -> list[Factors | EncodedRows]:
        """Returns the leading triplets of each gradient plus its residual."""
        vectors, others = self._vectors.split(parts)
        sent = self._gathered.compress(others)
        found = self._vectors.compressed(
            vectors, {part.slot: rows for part, rows in zip(others, sent, strict=True)}
        )
        return [found[part.slot] for part in parts]

    def commit(self, *, applied: bool) -> None:
        """Keeps the memories of the step if it is applied, those of before it otherwise."""
        super().commit(applied=applied)
        if self._budget is not None:
            self._budget.commit(applied=applied)
        self._sketches.forget()

    # -- residuals, and the state of a checkpoint ------------------------------------------------

    def remembers(self, unit: Unit) -> bool:
        """True if error feedback is on and the unit has no lookup, whose rows have no memory."""
        by_id = any(slot.lookup for slot in unit.slots)
        return self._settings.error_feedback is not None and not by_id

    def _unsent(self, slot: Slot, memory: Memory) -> Gradient | None:
        return residual_of(memory)

    def _without_unsent(self, memory: Memory) -> Memory:
        return replace(memory, residual=None)  # start directions are kept

    def _added(self, slot: Slot, residual: Gradient) -> Memory:
        memory, own = self._memories[slot], self.residual(slot)
        start = memory or Memory(tensors_of(residual)[0].new_zeros(slot.groups, slot.inputs, 0))
        return replace(start, residual=residual if own is None else formed(residual, own))

    def state(self) -> StateDict:
        """Returns, under "common", what is equal on all sites and, under "own", what is not."""
        gathered = self._budget or self._gathered
        way = {} if self.auto_way is None else {"low rank": self.auto_way.way.value}
        return {
            "common": {"way": way, **gathered.common_state(), **common_state(self._memories)},
            "own": {**gathered.own_state(), **super().state()["own"], "turn": self._memories.turn},
        }

    def _saved(self, memory: Memory) -> StateDict:
        return saved(memory)

    def load(self, inheritance: Inheritance) -> None:
        """Continues from saved states.

        Sketches must start from the same directions on all sites, triplets need not. At the same
        number of sites the saved route of low rank is kept, whatever the link is now.
        """
        way = inheritance.first["common"]["way"].get("low rank")
        known = self.auto_way and self.auto_way.way
        can = way != Route.TWO_WAY.value or self._owns
        if way is not None and can and inheritance.same_sites and Route(way) != known:
            self.auto_way = AutoWay(way=Route(way))
        sketches = self._low_rank_route(len(inheritance.predecessors)) == Route.REDUCE
        start = inheritance.first if sketches else inheritance.like
        self._memories.load(inheritance, start)
        (self._budget or self._gathered).load(inheritance)
        self._sketches.forget()

    def reveals(self, unit: Unit) -> str:
        """Returns what other sites learn from the unit, for the coverage table."""
        if unit.slots and all(slot.lookup for slot in unit.slots):
            return "this site's gradient: the ids it looked up and their rows"
        return "this site's gradient, its largest parts"
