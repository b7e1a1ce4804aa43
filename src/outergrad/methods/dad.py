"""dAD: sites send the factors of their gradients, where those are smaller."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outergrad.comm.cost import cost_of
from outergrad.core.blocks import UNSENDABLE, Replays
from outergrad.core.coding import Wire, stacked
from outergrad.core.compressor import Compressor
from outergrad.core.types import Factors, Gradient, Part, Route, Slot, Unit
from outergrad.linalg.canonical import canonical
from outergrad.linalg.outer import row_sum
from outergrad.methods.common import (
    Settings,
    bias_bytes,
    dense_bytes,
    require,
    row_bytes,
    tied_in_use,
    used_slots,
    without_silent_ids,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class DAD(Settings):
    """Sites send the factors of each weight gradient where they are fewer bytes (dAD).

    Choose it where layers see few rows per step, as in classifiers, MLPs and embeddings. Exact,
    unless `wire` says otherwise. Source: Baker et al., arXiv 2102.09631, section 3 (dAD).

    Attributes:
        always: send factors even where the dense gradient is fewer bytes.
        reveal: what a site shows of itself. "gradient": canonical factors, a function of the
            site's own gradient and nothing else. "activations": the raw rows of activations and
            deltas; less to compute, but the first layer's activations are the data.
        bucket_bytes: payload of one message before the next layer opens another. Smaller ones
            overlap better with backward, larger ones cost fewer delays (docs/benchmarks.md).
        wire: codecs of `og.wire` that rows go through: fewer bytes, at their loss, of which
            nothing is remembered. Bias gradients and ids travel as they are.
        every: k: share at every k-th synchronised backward only. Until then each site sums up its
            gradients; what is shared is their mean (docs/methods.md).
    """

    always: bool = False
    reveal: Literal["gradient", "activations"] = "gradient"
    bucket_bytes: int = 1 << 18
    wire: Wire = ()
    every: int = 1

    def __post_init__(self) -> None:
        """Checks the settings."""
        super().__post_init__()
        known = self.reveal in ("gradient", "activations")
        require(known, self, "reveal", "'gradient' or 'activations'")

    def compressor(self) -> DADCompressor:
        """A new compressor with these settings."""
        raw = self.reveal == "activations" and self.every == 1  # of several passes rows are kept
        return DADCompressor(self, Replays(recurrent=raw, raw_inputs=raw))


class DADCompressor(Compressor):
    """Decides by bytes between factors and dense, and makes the factors."""

    adapts = False

    def __init__(self, method: DAD, replays: Replays | None = None) -> None:
        self.forced = method.always
        self._canonical = method.reveal == "gradient"
        self.replays = replays or Replays()
        self.bucket_bytes = method.bucket_bytes
        self.wire = stacked(method.wire)

    def break_even(self, unit: Unit, sites: int) -> float:
        """Rows per slot from which on dense is fewer bytes, were all slots used alike."""
        if self.forced:
            return math.inf
        if sites == 1:
            return 0.0
        dense = dense_bytes(unit, cost_of(self, sites))
        if unit.block is not None:
            return dense  # its rows are bytes
        per_row = sum(row_bytes(slot, self.wire) for slot in unit.slots)
        biases = bias_bytes(slot for slot in unit.slots if self.sends_bias(slot))
        return (dense - biases) / per_row

    def route(self, unit: Unit, rows_SK: Sequence[Sequence[int]], *, tapped: bool) -> Route:
        """Factors, or what a block is computed again from, where they pay and are there."""
        return Route.GATHER if tapped and self.taps(unit, rows_SK) else Route.DENSE

    def taps(self, unit: Unit, rows_SK: Sequence[Sequence[int]]) -> bool:
        """Whether no site sends more than its share of the dense all-reduce would be.

        By the cost model: all-gathered factors cost a site (S - 1) times their size, an
        all-reduce in a ring 2 (S - 1) / S times the gradient. Slots of one weight that are used
        together (tied weights) travel dense under reveal="gradient": apart they would show more
        than their sum.
        """
        if unit.slots and self._canonical and tied_in_use(unit, rows_SK):
            return False
        if len(rows_SK) == 1 and not self.forced:
            return False
        largest = max(self._sent_bytes(unit, rows_K) for rows_K in rows_SK)
        most = UNSENDABLE if self.forced else dense_bytes(unit, cost_of(self, len(rows_SK)))
        return largest < most

    def sent_rows(self, slot: Slot, rows: int, site: int = 0) -> int:
        """N raw rows, or the largest rank that N rows can have."""
        if not self._canonical or slot.lookup:
            return rows
        return min(rows, slot.outputs, slot.inputs)

    def sends_bias(self, slot: Slot) -> bool:
        """Canonical factors have no row sums to take it from, encoded ones none that are exact."""
        return slot.bias is not None and (self._canonical or bool(self.wire))

    def compress(self, parts: Sequence[Part]) -> list[Factors]:
        """The raw rows, or canonical ones."""
        return [self._compressed(*part) for part in parts]

    def _compressed(self, slot: Slot, gradient: Gradient, rows: int) -> Factors:
        assert isinstance(gradient, Factors)
        if not self._canonical:
            b_GO = row_sum(gradient.d_GRO) if self.sends_bias(slot) else None
            return gradient._replace(b_GO=b_GO)
        if slot.lookup:
            return without_silent_ids(gradient)
        return canonical(gradient, rows, bias=slot.bias is not None)

    def reveals(self, unit: Unit) -> str:
        """What the coverage table says."""
        if unit.block is not None:
            return "what enters the block and the delta that comes back, of each row"
        if all(slot.lookup for slot in unit.slots):
            return "this site's gradient: the ids it looked up and their rows"
        return "this site's gradient" if self._canonical else "activations and deltas of each row"

    def _sent_bytes(self, unit: Unit, rows_K: Sequence[int]) -> int:
        if unit.block is not None:
            return sum(rows_K)  # they are bytes
        used = used_slots(unit, rows_K)
        biases = bias_bytes(slot for slot, _ in used if self.sends_bias(slot))
        return biases + sum(self.sent_rows(s, rows) * row_bytes(s, self.wire) for s, rows in used)
