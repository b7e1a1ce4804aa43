"""Kinds of payloads of a method: gathered, summed, or merged at an owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from outergrad.core.payload import FACTOR_ROWS, Arrived, Form, Payload
from outergrad.core.types import Gradient, Part, Slot
from outergrad.wire import Codec


class GatheredPayload(Protocol):
    """Payloads that all sites gather: their size, agreed before they are computed, and content."""

    form: Form = FACTOR_ROWS
    """Kind of payload that `compress` returns."""
    wire: tuple[Codec, ...] = ()
    """Codecs from the settings; `codecs` may override them for a slot."""
    exact: bool = True
    """True if the product of the sent rows is the gradient, apart from codecs."""
    adapts: bool = True
    """True if `sent_rows` also depends on the `wanted_rows` that the sites have sent."""

    def sent_rows(self, slot: Slot, rows: int, site: int) -> int:
        """R, the number of rows on the wire for N rows on a site; known before they are computed.

        A formed gradient counts as O rows. Payloads of another form count entries.
        """
        ...

    def wanted_rows(self, slot: Slot) -> int:
        """R that this site would like to send in the next step; it travels in the preamble."""
        return 0

    def agree(self, slot: Slot, site: int, rows: int) -> None:
        """Stores the `wanted_rows` that a site (this one included) has sent."""

    def payload_bytes(self, slot: Slot, count: int) -> int:
        """Approximate size in bytes of a payload of `count` rows, all numbers taken as float32."""
        width = slot.groups * (slot.inputs * (not slot.lookup) + slot.outputs)
        return 4 * width * count

    def codecs(self, slot: Slot) -> tuple[Codec, ...]:
        """Codecs for the deltas and activations of a slot; an empty tuple leaves them unchanged."""
        return self.wire

    def sends_bias(self, slot: Slot) -> bool:
        """True if `Factors.b_GO` is sent; otherwise receivers sum the deltas."""
        ...

    def compress(self, parts: Sequence[Part]) -> Sequence[Payload]:
        """Returns a payload for each part of a message, in the order of the parts.

        A payload of rows has exactly `Part.rows` rows; an exact method keeps their product. The
        parts are of different slots, so that similar ones may be computed together.
        """
        ...


class Sketches(Protocol):
    """A few linear functions (sketches) of the mean gradient, computed as sums over the sites.

    A step of a slot calls `begin`, `turn` and `end`, with an all-reduce after each of the first
    two. With one round it calls `begin` and `end`, with an all-reduce between them.
    """

    rounds: Literal[1, 2] = 2
    """Number of all-reduces per step."""

    def columns(self, slot: Slot) -> int:
        """K, the width of the sketches in this step; the same on all sites."""
        ...

    def shape(self, slot: Slot) -> tuple[int, ...]:
        """Shape of the first sketch; (G, O, K) for thin matrices."""
        return slot.groups, slot.outputs, self.columns(slot)

    def shape_ahead(self, slot: Slot) -> tuple[int, ...]:
        """Predicts `shape` in the next step, if this one counts."""
        return self.shape(slot)

    def projection(self, slot: Slot, sketch: Tensor) -> Tensor:
        """Returns this site's gradient along orthonormal directions, from its last sketch."""
        return sketch

    def begin(self, slot: Slot, gradient: Gradient) -> Tensor:
        """Returns this site's part of the first sketch; `dW Q` for thin matrices."""
        ...

    def turn(self, slot: Slot, y_GOK: Tensor) -> Tensor:
        """Returns this site's part `dWᵀ P` of the second sketch, from the sum of the first.

        It may have any shape. Not called where there is one round.
        """
        return y_GOK

    def end(self, slot: Slot, z: Tensor, sites: int) -> Arrived:
        """Returns the mean gradient, from the sum of the last sketch."""
        ...

    def first_stands_for(self, slot: Slot, part: Tensor) -> Arrived | None:
        """Returns the part of one site's gradient that its first sketch alone tells.

        For audits; called after `begin`, where there are two rounds. None where it is not known
        how to tell.

        Args:
            slot: of the sketch.
            part: the site's part of the first sketch, before it was summed.
        """
        return None

    def stands_for(self, slot: Slot, part: Tensor, mean: Arrived) -> Arrived | None:
        """Returns the part of one site's gradient that whoever sees its last sketch has.

        For audits; called after `end`. None where it is not known how to tell.

        Args:
            slot: of the sketch.
            part: the site's part of the last sketch, before it was summed.
            mean: result of `end`, which all sites have.
        """
        return None


class Merger(Protocol):
    """Merges rows, or entries, of several sites into as many as a single site sends."""

    def owner(self, slot: Slot) -> int | None:
        """Returns the site that merges the slot in this step; None for the plan's fixed owner."""
        return None

    def merged_rows(self, slot: Slot, rows_S: Sequence[int]) -> int:
        """R of the merged rows, from the row count of every site; 0 if all are 0."""
        ...

    def merged_bytes(self, slot: Slot, rows: int) -> int:
        """Approximate size in bytes of so many merged rows, to share slots out among owners."""
        return 4 * rows * slot.groups * (slot.inputs + slot.outputs)

    def merge(self, slot: Slot, parts: Sequence[Arrived], rows: int, sites: int) -> Payload:
        """Returns the mean over `sites` sites as a payload of so many rows.

        `parts` has nothing of sites without rows. With error feedback, the lost part of the mean is
        kept for the next step.
        """
        ...
