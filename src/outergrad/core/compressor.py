"""Protocol of the methods' compressors, and their base class: most answers have defaults."""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from typing import Protocol

import torch

from outergrad.core.blocks import Replays
from outergrad.core.cost import CostModel, Whole
from outergrad.core.reasons import AutoWay, Why
from outergrad.core.residual_store import ResidualStore
from outergrad.core.rounds import GatheredPayload, Merger, Sketches
from outergrad.core.transform import Projection
from outergrad.core.transport import Capability
from outergrad.core.types import Link, Route, Slot, Unit


class Compressor(GatheredPayload, ResidualStore, Protocol):
    """The implementation of a method: one object for all of its units, with its own memory.

    What it sends is told by kind of payload: it is itself a `GatheredPayload` of rows or entries,
    and has `sketches` for sums, a `merger` for rows that meet at an owner, and `replays` for
    blocks. Members with a value or a body suit a method without memory and without choices; a
    derived class implements the rest. That is `DADCompressor` for captured factors, and
    `methods/formed.py:FormedCompressor` for gradients that are formed before they are sent: derive
    from it for a payload of one's own.
    """

    sketches: Sketches | None = None
    """Sketches for units on `Route.REDUCE`."""
    merger: Merger | None = None
    """Merges the rows of a slot at its owner, on `Route.TWO_WAY`."""
    replays: Replays = Replays()
    """Parts of the model that all sites recompute instead of sending their gradients."""

    # -- once, before the first step ------------------------------------------------------------

    takes_plain: bool = False
    """True if the method compresses weights without a rule, too, from their formed gradients."""
    takes_vectors: bool = False
    """True if the method compresses formed gradients of vectors, as matrices of one column."""
    sums_formed: bool = False
    """True if all that a site sends of formed gradients is its part of sums over the sites."""
    sends_known: bool = False
    """True if `known` may tell what is sent."""
    needs: Set[Capability] = frozenset()
    """Transport capabilities that this method needs besides those that every method needs."""
    cost: CostModel | None = None
    """Cost model of the transport's collectives; None until it is attached."""

    def refuse(self, units: Sequence[Unit]) -> None:
        """Raises ValueError that names a parameter which the method cannot handle."""

    def settle(self, cost: CostModel, capabilities: Set[Capability]) -> None:
        """Stores the transport's properties before anything is asked of a step.

        Args:
            cost: cost model of its collectives.
            capabilities: of the transport; they include `needs`.
        """
        self.cost = cost

    def settle_budget(self, units: Sequence[Unit], whole: Whole) -> None:
        """Fixes the bytes that the units may send per step, alike on all sites; after `settle`.

        Raises:
            ValueError: the budget is too small.
        """

    def wants_link(self, sites: int) -> bool:
        """True if the route of low-rank gradients depends on the measured link."""
        return False

    def settle_reduce(self, units: Sequence[Unit], sites: int, link: Link) -> None:
        """Fixes the route of low-rank gradients for good; the arguments are equal on all sites."""

    def forget(self, weights: Set[str]) -> None:
        """Lets the method keep no residual of these weights in steps that send all their entries.

        Args:
            weights: full names of weights that are not moved by the mean of what the sites send.
        """

    # -- route of a unit, from what all sites agreed on: alike on every site --------------------
    # A block is a unit with one source, whose rows are the bytes that a site sends of it. Only a
    # method with `replays` is asked about blocks.

    bucket_bytes: int
    """Payload bytes of a bucket from which on the next layer opens another one."""
    forced: bool = False
    """True if factors are sent even where the dense gradient has fewer bytes."""
    uses_rows: bool = True
    """True if a decision depends on row counts; if not, layers need not count rows."""
    phase: Hashable = 0
    """State besides the arguments that `route` and `sent_rows` depend on; equal on all sites."""

    def break_even(self, unit: Unit, sites: int) -> float:
        """Rows per site from which on the unit travels dense; inf for never, 0 for always."""
        ...

    def route(self, unit: Unit, rows_SK: Sequence[Sequence[int]], *, tapped: bool) -> Route:
        """Returns the unit's route for the rows of every site (S) and source (K).

        Args:
            unit: the unit.
            rows_SK: agreed row counts.
            tapped: whether every site has captured factors; otherwise the gradients are formed.
        """
        ...

    def taps(self, unit: Unit, rows_SK: Sequence[Sequence[int]]) -> bool:
        """True if the layers should capture factors in a forward with these row counts."""
        ...

    # -- for transforms -------------------------------------------------------------------------

    def known(self, unit: Unit, slot: Slot, device: torch.device) -> Projection | None:
        """Returns what is sent of a formed gradient in this step; None if it is not known before.

        Args:
            unit: the unit.
            slot: one of its matrices.
            device: of its weight.
        """
        return None

    # -- texts of the coverage table ------------------------------------------------------------

    why: Why = Why.LOW_RANK
    """Reason shown for a unit that travels compressed."""
    auto_way: AutoWay | None = None
    """The route chosen from the link between the sites, if it was chosen so."""

    def amount(self, unit: Unit) -> str:
        """Describes how much is sent of a unit that travels sparse or compressed."""
        return ""

    def reveals(self, unit: Unit) -> str:
        """Describes what the other sites can learn from the unit's factors."""
        ...
