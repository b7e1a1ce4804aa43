"""Compressor of `RankDAD` and `PowerSGD`: payload of each layer, and error feedback."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from outergrad.core.coding import Codecs, drops
from outergrad.core.payload import EncodedRows
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
    """Sends triplets or sketches of gradients, or exact factors where they are fewer bytes."""

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

    def residual(self, slot: Slot) -> Gradient | None:
        """Returns what error feedback adds to the gradient of the next step; None for nothing."""
        return residual_of(self._memories[slot])

    def commit(self, *, applied: bool) -> None:
        """Keeps the memories of the step if it is applied, those of before it otherwise."""
        self._memories.commit(applied=applied)
        if self._budget is not None:
            self._budget.commit(applied=applied)
        self._sketches.forget()

    def keep_before(self, places: Collection[Place]) -> None:
        """Keeps the residuals of before the last committed step until `decide`."""
        self._memories.keep_before(places)

    def decide(self, places: Collection[Place], *, used: bool) -> None:
        """Drops what `keep_before` kept, or restores it if the gradients were not used."""
        self._memories.decide(places, used=used)

    # -- change of the method -------------------------------------------------------------------

    def remembers(self, unit: Unit) -> bool:
        """True if error feedback is on and the unit has no lookup, whose rows have no memory."""
        by_id = any(slot.lookup for slot in unit.slots)
        return self._settings.error_feedback is not None and not by_id

    def hand_over(self, slots: Sequence[Slot]) -> dict[Slot, Gradient]:
        """Returns and forgets the residuals of these slots; start directions are kept."""
        found: dict[Slot, Gradient] = {}
        for slot in slots:
            memory, residual = self._memories[slot], self.residual(slot)
            if memory is not None and residual is not None:
                found[slot] = residual
                self._memories.put(slot, replace(memory, residual=None))
        return found

    def take_over(self, slot: Slot, residual: Gradient) -> None:
        """Adds a residual to the slot's own one, if there is one."""
        memory, own = self._memories[slot], residual_of(self._memories[slot])
        tensors = tensors_of(residual)
        start = memory or Memory(tensors[0].new_zeros(slot.groups, slot.inputs, 0))
        whole = residual if own is None else formed(residual, own)
        self._memories.put(slot, replace(start, residual=whole))

    # -- state of a checkpoint ------------------------------------------------------------------

    def state(self) -> StateDict:
        """Returns, under "common", what is equal on all sites and, under "own", what is not."""
        gathered = self._budget or self._gathered
        way = {} if self.auto_way is None else {"low rank": self.auto_way.way.value}
        return {
            "common": {"way": way, **gathered.common_state(), **common_state(self._memories)},
            "own": {**gathered.own_state(), **own_state(self._memories)},
        }

    def load(self, inheritance: Inheritance) -> None:
        """Continues from saved states.

        Sketches must start from the same directions on all sites, triplets need not. At the same
        number of sites the saved route of low rank is kept, whatever the link is now.
        """
        way = inheritance.first["common"]["way"].get("low rank")
        known = self.auto_way and self.auto_way.way
        can = way != Route.TWO_WAY.value or self._owns
        if way is not None and can and inheritance.same_sites and Route(way) != known:
            self._resume_way(Route(way))
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
