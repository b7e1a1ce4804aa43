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
from outergrad.core.payload import CANONICAL_ROWS, FACTOR_ROWS
from outergrad.core.types import Factors, Gradient, Part, Route, Slot, Unit
from outergrad.drift.on_drift import OnDrift
from outergrad.linalg.outer import row_sum
from outergrad.linalg.power import canonical
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

    Choose it where layers see few rows per step, as in classifiers, MLPs and embeddings. Gradients
    are exact unless `wire` has codecs: in bfloat16 no further from the mean than DDP's. Source:
    Baker et al., arXiv 2102.09631, section 3 (dAD).

    Attributes:
        always: Sends factors even where the dense gradient is fewer bytes.
        reveal: What the other sites see. "gradient": canonical factors, a function of the site's
            own gradient and nothing else. "activations": the raw rows of activations and deltas;
            less to compute, but the first layer's activations are the data.
        bucket_bytes: Payload of one message, bytes, before the next layer opens another. Smaller
            messages overlap better with backward, larger ones cost fewer delays
            (docs/benchmarks.md).
        wire: Codecs of `og.wire` for the rows: fewer bytes, at a loss that is not made up for
            later. Bias gradients and ids are not encoded.
        every: k: gradients are shared at every k-th synchronised backward pass only. Until then
            each site sums up its gradients; their mean is shared (docs/methods.md). Or
            `og.OnDrift(...)`: whenever a site's data drift.
    """

    always: bool = False
    reveal: Literal["gradient", "activations"] = "gradient"
    bucket_bytes: int = 1 << 18
    wire: Wire = ()
    every: int | OnDrift = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.reveal in ("gradient", "activations")
        require(known, self, "reveal", "'gradient' or 'activations'")

    def compressor(self) -> DADCompressor:
        """Returns a new compressor with these settings."""
        raw = self.reveal == "activations" and self.every == 1  # every > 1 keeps the rows
        return DADCompressor(self, Replays(recurrent=raw, raw_inputs=raw))


class DADCompressor(Compressor):
    """Sends factors, raw or canonical, of units for which they are fewer bytes than dense."""

    adapts = False
    sums_formed = True

    def __init__(self, method: DAD, replays: Replays | None = None) -> None:
        self.forced = method.always
        self._canonical = method.reveal == "gradient"
        self.replays = replays or Replays()
        self.form = CANONICAL_ROWS if self._canonical else FACTOR_ROWS
        self.bucket_bytes = method.bucket_bytes
        self.wire = stacked(method.wire)

    def break_even(self, unit: Unit, sites: int) -> float:
        """Returns the rows per slot, equal for all slots, from which dense is fewer bytes."""
        if self.forced:
            return math.inf
        if sites == 1:
            return 0.0
        dense = dense_bytes(unit, cost_of(self, sites))
        if unit.block is not None:
            return dense  # the rows of a block are bytes
        per_row = sum(row_bytes(slot, self.wire) for slot in unit.slots)
        biases = bias_bytes(slot for slot in unit.slots if self.sends_bias(slot))
        return (dense - biases) / per_row

    def route(self, unit: Unit, rows_SK: Sequence[Sequence[int]], *, tapped: bool) -> Route:
        """Returns GATHER if the unit is tapped and its payload is fewer bytes, DENSE otherwise."""
        return Route.GATHER if tapped and self.taps(unit, rows_SK) else Route.DENSE

    def taps(self, unit: Unit, rows_SK: Sequence[Sequence[int]]) -> bool:
        """True if every site sends fewer bytes than its share of a dense all-reduce.

        In the cost model all-gathered factors cost a site (S - 1) times their size, and a ring
        all-reduce costs 2 (S - 1) / S times the gradient. Slots of one weight that are used in the
        same step (tied weights) travel dense under reveal="gradient": separate factors would reveal
        more than their sum.
        """
        if unit.slots and self._canonical and tied_in_use(unit, rows_SK):
            return False
        if len(rows_SK) == 1 and not self.forced:
            return False
        largest = max(self._sent_bytes(unit, rows_K) for rows_K in rows_SK)
        most = UNSENDABLE if self.forced else dense_bytes(unit, cost_of(self, len(rows_SK)))
        return largest < most

    def sent_rows(self, slot: Slot, rows: int, site: int = 0) -> int:
        """Returns the number of raw rows, or the largest rank that they can have."""
        if not self._canonical or slot.lookup:
            return rows
        return min(rows, slot.outputs, slot.inputs)

    def sends_bias(self, slot: Slot) -> bool:
        """True if the bias travels apart: canonical and encoded rows have no exact sums for it."""
        return slot.bias is not None and (self._canonical or bool(self.wire))

    def compress(self, parts: Sequence[Part]) -> list[Factors]:
        """Returns the raw or the canonical rows of each part."""
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
        """Returns what other sites learn from the unit, for the coverage table."""
        if unit.block is not None:
            return "what enters the block and the delta that comes back, of each row"
        if all(slot.lookup for slot in unit.slots):
            return "this site's gradient: the ids it looked up and their rows"
        return "this site's gradient" if self._canonical else "activations and deltas of each row"

    def _sent_bytes(self, unit: Unit, rows_K: Sequence[int]) -> int:
        if unit.block is not None:
            return sum(rows_K)  # the rows of a block are bytes
        used = used_slots(unit, rows_K)
        biases = bias_bytes(slot for slot, _ in used if self.sends_bias(slot))
        return biases + sum(self.sent_rows(s, rows) * row_bytes(s, self.wire) for s, rows in used)
