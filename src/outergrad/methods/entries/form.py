"""How entries stand in a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from outergrad.core.coding import Codecs, Field
from outergrad.core.payload import Entries, Payload
from outergrad.core.types import Slot
from outergrad.linalg.selection import entries_of
from outergrad.messages import places

_WIDTH = 256
"""Values that a codec takes for one row at most: those of `og.wire.Int8` share a step."""


@dataclass(frozen=True)
class EntriesForm:
    """Values and the places of their blocks, as bytes.

    Attributes:
        block: entries of a block; 1 where each entry has a place of its own.
    """

    block: int = 1

    def fields(
        self, slot: Slot, count: int, dtype: torch.dtype, bias: torch.dtype | None, codecs: Codecs
    ) -> list[Field]:
        """Values, in rows for the codecs, and places, unless all are sent."""
        size = places.nbytes(*self.blocks(slot, count))
        of_places = [Field((size,), torch.uint8)] if size else []
        return [Field(value_shape(count, coded=bool(codecs)), dtype, codecs), *of_places]

    def payload(self, values_K: Tensor, blocks_B: Tensor, slot: Slot, codecs: Codecs) -> Payload:
        """What is written of the entries of some blocks."""
        blocks, chosen = self.blocks(slot, len(values_K))
        values = in_rows(values_K) if codecs else values_K
        return [values] if chosen == blocks else [values, places.packed(blocks_B, blocks)]

    def read(self, tensors: Sequence[Tensor], slot: Slot, count: int) -> Entries:
        """The entries.

        Raises:
            ValueError: the bytes of the places are none.
        """
        values_K, *content = tensors[0].flatten()[:count], *tensors[1:]
        packed = (
            content[0] if content else torch.empty(0, dtype=torch.uint8, device=values_K.device)
        )
        blocks_B = places.unpacked(packed, *self.blocks(slot, count))
        shape = slot.groups, slot.outputs, slot.inputs
        return Entries(values_K, self.places(blocks_B, slot.numel), shape)

    def places(self, blocks_B: Tensor, numel: int) -> Tensor:
        """Of all entries of some blocks."""
        return blocks_B if self.block == 1 else entries_of(blocks_B, numel, self.block)

    def blocks(self, slot: Slot, count: int) -> tuple[int, int]:
        """How many there are, and how many have so many entries."""
        return -(-slot.numel // self.block), -(-count // self.block)


def value_shape(count: int, *, coded: bool) -> tuple[int, ...]:
    """Of so many values: where codecs take rows, in as few as can be, of about equal length."""
    rows = -(-count // _WIDTH)
    return (rows, -(-count // rows)) if coded else (count,)


def in_rows(values_K: Tensor) -> Tensor:
    """With zeros behind them."""
    rows, width = value_shape(len(values_K), coded=True)
    return pad(values_K, (0, rows * width - len(values_K))).view(rows, width)
