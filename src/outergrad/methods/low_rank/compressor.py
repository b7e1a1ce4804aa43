"""What stands behind `RankDAD` and `PowerSGD`: what is sent of a layer, and what is remembered."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from outergrad.core.coding import Codecs, drops
from outergrad.core.payload import EncodedRows
from outergrad.core.reasons import AutoWay
from outergrad.core.step_size import Whole
from outergrad.core.transport import Capability
from outergrad.core.types import (
    Factors,
    Gradient,
    Inheritance,
    Part,
    Place,
    Route,
    Slot,
    StateDict,
    Unit,
    tensors_of,
)
from outergrad.linalg.outer import formed
from outergrad.methods.low_rank.alternating import AlternatingSketches
from outergrad.methods.low_rank.budget import Budget
from outergrad.methods.low_rank.cost import Sizes, exact_rows
from outergrad.methods.low_rank.memory import (
    Memories,
    Memory,
    common_state,
    own_state,
    residual_of,
)
from outergrad.methods.low_rank.merging import Merging
from outergrad.methods.low_rank.prices import Prices, rows_in_messages, settled
from outergrad.methods.low_rank.routing import LowRankRouting
from outergrad.methods.low_rank.settings import LowRankSettings
from outergrad.methods.low_rank.sketches import GlobalSketches
from outergrad.methods.low_rank.triplets import Gathered
from outergrad.methods.low_rank.vectors import RowsAndBias, Vectors


class LowRankCompressor(LowRankRouting):
    """The compressor of `RankDAD` and of `PowerSGD`."""

    takes_plain = True
    exact = False

    def __init__(self, settings: LowRankSettings) -> None:
        self._build(settings)

    def _build(self, settings: LowRankSettings) -> None:
        self._settings, self.adapts = settings, settings.adapts
        self.bucket_bytes = settings.bucket_bytes
        self.wire, self.takes_vectors = settings.codecs, bool(settings.vectors)
        self._sums = not drops(settings.codecs) and not settings.vectors
        self._sizes, self._memories = Sizes(settings), Memories(packs=settings.packs)
        self._gathered = Gathered(settings, self._memories, self._budget)
        self._vectors = Vectors(settings, self._memories)
        if settings.vectors:
            self.form = RowsAndBias(settings.vector_codecs)
        sketches = AlternatingSketches if settings.alternates else GlobalSketches
        self.sketches = self._sketches = sketches(settings, self._memories)
        self.merger = Merging(settings, self._memories, self._vectors, self._budget)
        if settings.reduce == "two_way":
            self.needs = frozenset({Capability.ALL_TO_ALL})

    def settle_budget(self, units: Sequence[Unit], whole: Whole) -> None:
        """Goes by the largest rank that fits it in all layers alike, to say what travels how."""
        if self._settings.budget is None or self.cost is None or self.cost.sites == 1:
            return
        way = self._low_rank_route(self.cost.sites)
        prices = Prices(units, whole, self.cost, self.form, way)
        settings = settled(self._settings, prices, [m for unit in units for m in unit.matrices])
        matrices = [m for unit in prices.low_rank(settings) for m in unit.matrices]
        nbytes = settings.budget_bytes(prices.dense())
        self._budget = Budget(settings, matrices, prices, nbytes, self.cost.sites)
        self._build(settings)

    # -- gathered -------------------------------------------------------------------------------

    def sent_rows(self, slot: Slot, rows: int, site: int) -> int:
        """All rows of an exact layer; else as many triplets as the site wanted, or as there are."""
        exact = exact_rows(slot, rows)
        if slot.vector or (slot.lookup and self._budget is None):
            return exact
        if self._budget is not None:
            return min(exact, self._budget.rows(slot, site))
        return self._gathered.sent_rows(slot, min(exact, self._settings.rank), site)

    def payload_bytes(self, slot: Slot, count: int) -> int:
        """Of one rank where ranks change, so that the same layers share a message in all steps.

        With a budget as it is written: these messages are to be few.
        """
        if self._budget is not None:
            return rows_in_messages(self._settings, slot)
        if self._settings.tolerance and not slot.vector and not slot.lookup:
            count = min(self._settings.rank, slot.outputs, slot.inputs)
        return super().payload_bytes(slot, count) // (1 + self._settings.alternates)

    def codecs(self, slot: Slot) -> Codecs:
        """All that it was given, unless what they lose could not be remembered."""
        return self._sizes.codecs(slot)

    def sends_bias(self, slot: Slot) -> bool:
        """Triplets have no row sums to take it from."""
        return slot.bias is not None

    def wanted_rows(self, slot: Slot) -> int:
        """The rank that the tolerance asks for, or that its share of the budget pays for."""
        return (self._budget or self._gathered).wanted_rows(slot)

    def agree(self, slot: Slot, site: int, rows: int) -> None:
        """What the site will send in the next step."""
        (self._budget or self._gathered).agree(slot, site, rows)

    def compress(self, parts: Sequence[Part]) -> list[Factors | EncodedRows]:
        """The leading triplets of each gradient and of what was not sent of it before."""
        vectors, others = self._vectors.split(parts)
        sent = self._gathered.compress(others)
        found = self._vectors.compressed(
            vectors, {part.slot: rows for part, rows in zip(others, sent, strict=True)}
        )
        return [found[part.slot] for part in parts]

    def residual(self, slot: Slot) -> Gradient | None:
        """What error feedback adds to the gradient of the next step."""
        return residual_of(self._memories[slot])

    def commit(self, *, applied: bool) -> None:
        """Keeps what the step left, or, if the step is void, what there was before it."""
        self._memories.commit(applied=applied)
        if self._budget is not None:
            self._budget.commit(applied=applied)
        self._sketches.forget()

    def keep_before(self, places: Collection[Place]) -> None:
        """What was not sent before the last step is kept, too."""
        self._memories.keep_before(places)

    def decide(self, places: Collection[Place], *, used: bool) -> None:
        """It is forgotten, or holds again."""
        self._memories.decide(places, used=used)

    # -- handed over ----------------------------------------------------------------------------

    def remembers(self, unit: Unit) -> bool:
        """Unless it is told not to; rows by id have no memory."""
        by_id = any(slot.lookup for slot in unit.slots)
        return self._settings.error_feedback is not None and not by_id

    def hand_over(self, slots: Sequence[Slot]) -> dict[Slot, Gradient]:
        """Start directions are kept."""
        found: dict[Slot, Gradient] = {}
        for slot in slots:
            memory, residual = self._memories[slot], self.residual(slot)
            if memory is not None and residual is not None:
                found[slot] = residual
                self._memories.put(slot, replace(memory, residual=None))
        return found

    def take_over(self, slot: Slot, residual: Gradient) -> None:
        """Adds to what it remembers itself, if anything."""
        memory, own = self._memories[slot], residual_of(self._memories[slot])
        tensors = tensors_of(residual)
        start = memory or Memory(tensors[0].new_zeros(slot.groups, slot.inputs, 0))
        whole = residual if own is None else formed(residual, own)
        self._memories.put(slot, replace(start, residual=whole))

    # -- saved and loaded -----------------------------------------------------------------------

    def state(self) -> StateDict:
        """Under "common" what all sites know, under "own" what differs between them."""
        gathered = self._budget or self._gathered
        way = {} if self.auto_way is None else {"low rank": self.auto_way.way.value}
        return {
            "common": {"way": way, **gathered.common_state(), **common_state(self._memories)},
            "own": {**gathered.own_state(), **own_state(self._memories)},
        }

    def load(self, inheritance: Inheritance) -> None:
        """Sketches have to begin with the same directions everywhere, triplets need not.

        At the same number of sites low rank travels as it did, whatever the link is now.
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
        """What the coverage table says."""
        if unit.slots and all(slot.lookup for slot in unit.slots):
            return "this site's gradient: the ids it looked up and their rows"
        return "this site's gradient, its largest parts"
