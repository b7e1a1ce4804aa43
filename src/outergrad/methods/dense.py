"""Dense exchange: what everybody else does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outergrad.core.compressor import Compressor
from outergrad.core.payload import Payload
from outergrad.core.reasons import Why
from outergrad.core.types import Part, Route, Slot, Unit
from outergrad.methods.common import Settings


@dataclass(frozen=True, kw_only=True, repr=False)
class Dense(Settings):
    """Every gradient is all-reduced in buckets during backward, as DDP does.

    Choose it where the link is fast, or to compare with.

    Attributes:
        every: k: share at every k-th synchronised backward only. Until then each site sums up its
            gradients; what is shared is their mean (docs/methods.md).
    """

    every: int = 1

    def compressor(self) -> None:
        """None: nothing travels as factors."""
        return


class DenseCompressor(Compressor):
    """That of a unit which travels dense for now."""

    bucket_bytes = 1
    uses_rows = False
    why = Why.DENSE

    def break_even(self, unit: Unit, sites: int) -> float:
        """Always dense."""
        return 0.0

    def route(self, unit: Unit, rows_SK: Sequence[Sequence[int]], *, tapped: bool) -> Route:
        """Dense."""
        return Route.DENSE

    def taps(self, unit: Unit, rows_SK: Sequence[Sequence[int]]) -> bool:
        """Nothing is made of factors."""
        return False

    def sent_rows(self, slot: Slot, rows: int, site: int) -> int:
        """None."""
        return 0

    def sends_bias(self, slot: Slot) -> bool:
        """Not by itself."""
        return False

    def compress(self, parts: Sequence[Part]) -> list[Payload]:
        """Never called."""
        return []

    def reveals(self, unit: Unit) -> str:
        """What the coverage table says."""
        return "this site's gradient"
