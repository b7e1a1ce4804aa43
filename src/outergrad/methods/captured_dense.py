"""The dense method for transforms that need samples: layers are captured, and travel dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outergrad.core.protocols import Exchange
from outergrad.core.types import Factors, Part, Route, Slot, Unit
from outergrad.methods.dense import Dense


@dataclass(frozen=True, kw_only=True, repr=False)
class CapturedDense(Dense):
    """As `Dense`, but the rows of layers are known to the site that captured them."""

    def exchange(self) -> CapturedDenseExchange:  # type: ignore[override]
        """A new exchange."""
        return CapturedDenseExchange()


class CapturedDenseExchange(Exchange):
    """Sends no rows, ever."""

    bucket_bytes: int = 1

    def break_even(self, unit: Unit, sites: int) -> float:
        """Never."""
        return 0.0

    def route(self, unit: Unit, rows_SK: Sequence[Sequence[int]], *, tapped: bool) -> Route:
        """Always dense."""
        return Route.DENSE

    def taps(self, unit: Unit, rows_SK: Sequence[Sequence[int]]) -> bool:
        """Not for its own sake."""
        return False

    def sent_rows(self, slot: Slot, rows: int, site: int) -> int:
        """None."""
        return 0

    def sends_bias(self, slot: Slot) -> bool:
        """It is part of the dense gradient."""
        return False

    def compress(self, parts: Sequence[Part]) -> list[Factors]:
        """There is nothing to compress."""
        assert not parts
        return []

    def reveals(self, unit: Unit) -> str:
        """As of every dense gradient."""
        return "this site's gradient"
