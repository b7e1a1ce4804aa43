"""What stands behind a method: its compressor, by the questions that it answers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from typing import Protocol

from outergrad.core.blocks import Replays
from outergrad.core.cost import CostModel
from outergrad.core.payload import FACTOR_ROWS, Form, Payload
from outergrad.core.reasons import AutoWay, Why
from outergrad.core.residual_store import ResidualStore
from outergrad.core.rounds import Merger, Sketches
from outergrad.core.step_size import Whole
from outergrad.core.transport import Capability
from outergrad.core.types import Link, Part, Route, Slot, Unit
from outergrad.wire import Codec


class Setup(Protocol):
    """What a method asks of a model and of a transport, once, before the first step."""

    takes_plain: bool = False
    """Whether weights without a rule are its business, too: their formed gradients."""
    takes_vectors: bool = False
    """Whether formed gradients of vectors are, as matrices of one column."""
    replays: Replays = Replays()
    """What is to be computed again by all sites, instead of being sent."""
    needs: Set[Capability] = frozenset()
    """What it cannot do without, besides what all methods need."""
    cost: CostModel | None = None
    """What collectives cost on its transport; None until it is attached."""

    def refuse(self, units: Sequence[Unit]) -> None:
        """Raises ValueError, by name, for what the method cannot do."""

    def settle(self, cost: CostModel, capabilities: Set[Capability]) -> None:
        """Takes note of the transport before anything is asked of a step.

        Args:
            cost: of its collectives.
            capabilities: what it can do; `needs` is among it.
        """
        self.cost = cost

    def settle_budget(self, units: Sequence[Unit], whole: Whole) -> None:
        """Decides what its units may send in a step, behind `settle`; the same on every site.

        Raises:
            ValueError: that is too little.
        """

    def wants_link(self, sites: int) -> bool:
        """Whether the way of low rank depends on the link."""
        return False

    def settle_reduce(self, units: Sequence[Unit], sites: int, link: Link) -> None:
        """Decides for good how low rank travels; the same figures on every site."""


class Routing(Protocol):
    """How a unit travels in a step: the same on every site, from what all have agreed on.

    A block is a unit of one source, whose rows are the bytes that a site sends of it. Only a
    method with `replays` is asked about blocks.
    """

    bucket_bytes: int
    """Payload of one message before the next layer opens another."""
    forced: bool = False
    """Whether factors are sent even where dense would be fewer bytes."""
    uses_rows: bool = True
    """Whether anything that it decides follows from rows; if not, layers need not count them."""
    phase: Hashable = 0
    """What `route` and `sent_rows` follow from besides their arguments; the same on all sites."""

    def break_even(self, unit: Unit, sites: int) -> float:
        """Rows per site from which on the unit travels dense; inf for never, 0 for always."""
        ...

    def route(self, unit: Unit, rows_SK: Sequence[Sequence[int]], *, tapped: bool) -> Route:
        """How the unit travels, for the rows of every site (S) and source (K).

        Args:
            unit: the unit.
            rows_SK: as agreed.
            tapped: whether every site has the factors; otherwise they have formed gradients.
        """
        ...

    def taps(self, unit: Unit, rows_SK: Sequence[Sequence[int]]) -> bool:
        """Whether its products should be tapped in a forward with so many rows."""
        ...


class Encoding(Protocol):
    """What is sent of a slot: how much, agreed before it is computed, and the payload itself."""

    form: Form = FACTOR_ROWS
    """What kind of payload it makes."""
    wire: tuple[Codec, ...] = ()
    """The codecs that it was given, for what it does not say otherwise in `codecs`."""
    exact: bool = True
    """Whether the rows that it sends have the product of the gradient, but for their codecs."""
    adapts: bool = True
    """Whether `sent_rows` follows from what the sites have said in `wanted_rows`, too."""
    sketches: Sketches | None = None
    """The state of what takes `Route.REDUCE`."""
    merger: Merger | None = None
    """What the owner of a slot does on `Route.TWO_WAY`."""

    def sent_rows(self, slot: Slot, rows: int, site: int) -> int:
        """R, the rows on the wire for N rows on a site: agreed before they are computed.

        A formed gradient counts as O rows. Of another payload than rows, how many entries.
        """
        ...

    def wanted_rows(self, slot: Slot) -> int:
        """R that this site would like to send in the next step; travels with its factors."""
        return 0

    def agree(self, slot: Slot, site: int, rows: int) -> None:
        """Takes note of what a site, this one too, said in `wanted_rows`."""

    def payload_bytes(self, slot: Slot, count: int) -> int:
        """About how long the payload of so many rows is, as if all numbers were float32."""
        width = slot.groups * (slot.inputs * (not slot.lookup) + slot.outputs)
        return 4 * width * count

    def codecs(self, slot: Slot) -> tuple[Codec, ...]:
        """What the deltas and activations of a slot go through; none for as they are."""
        return self.wire

    def sends_bias(self, slot: Slot) -> bool:
        """Whether `Factors.b_GO` travels; otherwise it is the sum of the deltas."""
        ...

    def compress(self, parts: Sequence[Part]) -> Sequence[Payload]:
        """A payload of each part of a message, in the order of the parts.

        Of rows exactly `rows`, for an exact method with the same product. The parts are of
        different slots; what is alike may be computed together.
        """
        ...


class Description(Protocol):
    """What people are told, in the coverage table."""

    why: Why = Why.LOW_RANK
    """What is told of a unit that travels compressed."""
    auto_way: AutoWay | None = None
    """How low rank travels, where that was chosen by the link between the sites."""

    def amount(self, unit: Unit) -> str:
        """What is sent of a unit that travels sparse or compressed."""
        return ""

    def reveals(self, unit: Unit) -> str:
        """What the other sites can learn from the unit's factors."""
        ...


class Compressor(Setup, Routing, Encoding, ResidualStore, Description, Protocol):
    """What stands behind a method: one for all of its units, with a memory of its own.

    What its parts have with a value, or a body, is right for a method that remembers nothing and
    has nothing to choose: a class that derives from this one writes the rest.
    """
