"""What methods without memory have in common."""

from __future__ import annotations

from collections.abc import Sequence

from outergrad.core.blocks import Replays
from outergrad.core.coding import Codecs
from outergrad.core.protocols import Merger, Sketches
from outergrad.core.reasons import AutoWay
from outergrad.core.types import Gradient, Inheritance, Link, Slot, StateDict, Unit


class Stateless:
    """An exchange of factors in which every step stands by itself."""

    wire: Codecs = ()
    forced = False
    takes_plain = False
    replays = Replays()
    sketches: Sketches | None = None
    merger: Merger | None = None
    exact = True
    auto_way: AutoWay | None = None

    def replays_block(self, unit: Unit, nbytes_S: Sequence[int]) -> bool:
        """Nothing is computed again."""
        return False

    def wants_link(self, sites: int) -> bool:
        """Nothing to choose."""
        return False

    def settle_reduce(self, units: Sequence[Unit], sites: int, link: Link) -> None:
        """Nothing to choose."""

    def codecs(self, slot: Slot) -> Codecs:
        """The same for all."""
        return self.wire

    def wanted_rows(self, slot: Slot) -> int:
        """Nothing: rows follow from the header."""
        return 0

    def agree(self, slot: Slot, site: int, rows: int) -> None:
        """Nothing to remember."""

    def residual(self, slot: Slot) -> Gradient | None:
        """Nothing: all is sent."""
        return None

    def commit(self, *, applied: bool) -> None:
        """Nothing to remember."""

    def state(self) -> StateDict:
        """Nothing to save."""
        return {}

    def load(self, inheritance: Inheritance) -> None:
        """Nothing to go on from."""
