"""Dense exchange: gradients are all-reduced, as DistributedDataParallel does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outergrad.core.compressor import Compressor
from outergrad.core.payload import Payload
from outergrad.core.reasons import Why
from outergrad.core.types import Part, Route, Slot, Unit
from outergrad.drift.on_drift import OnDrift
from outergrad.methods.common import Settings


@dataclass(frozen=True, kw_only=True, repr=False)
class Dense(Settings):
    """Every gradient is all-reduced in buckets during backward, as DDP does.

    Choose it where the link is fast, or as a baseline.

    Attributes:
        every: k: gradients are shared at every k-th synchronised backward pass only. Until then
            each site sums up its gradients; their mean is shared (docs/methods.md). Or
            `og.OnDrift(...)`: whenever a site's data drift.
    """

    every: int | OnDrift = 1

    def compressor(self) -> None:
        """Returns None: no parameter needs a compressor."""
        return


class DenseCompressor(Compressor):
    """Compressor of a unit that is dense, for policies whose methods may change."""

    bucket_bytes = 1
    uses_rows = False
    sums_formed = True
    why = Why.DENSE

    def break_even(self, unit: Unit, sites: int) -> float:
        """Returns 0: dense for any number of rows."""
        return 0.0

    def route(self, unit: Unit, rows_SK: Sequence[Sequence[int]], *, tapped: bool) -> Route:
        """Returns DENSE."""
        return Route.DENSE

    def taps(self, unit: Unit, rows_SK: Sequence[Sequence[int]]) -> bool:
        """Returns False: no factors are needed."""
        return False

    def sent_rows(self, slot: Slot, rows: int, site: int) -> int:
        """Returns 0: no rows are sent."""
        return 0

    def sends_bias(self, slot: Slot) -> bool:
        """Returns False: the bias is part of the dense gradient."""
        return False

    def compress(self, parts: Sequence[Part]) -> list[Payload]:
        """Returns an empty list; never called, as the route is always dense."""
        return []

    def reveals(self, unit: Unit) -> str:
        """Returns what other sites learn from the unit, for the coverage table."""
        return "this site's gradient"


@dataclass(frozen=True, kw_only=True, repr=False)
class CapturedDense(Dense):
    """`Dense` with captured layers: each site knows the activations and deltas of its own rows."""

    def compressor(self) -> DenseCompressor:  # type: ignore[override]
        """Returns a new compressor."""
        return DenseCompressor()
