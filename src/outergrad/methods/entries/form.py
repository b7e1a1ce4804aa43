"""Form of sparse entries in a message."""

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
"""Largest number of values in a row for codecs: `og.wire.Int8` has one step per row."""


@dataclass(frozen=True)
class EntriesForm:
    """Values, and the places of their blocks as bytes.

    Attributes:
        block: Entries of a block; 1 where each entry has a place of its own.
    """

    block: int = 1

    def fields(
        self, slot: Slot, count: int, dtype: torch.dtype, bias: torch.dtype | None, codecs: Codecs
    ) -> list[Field]:
        """Returns the fields: values, in rows for codecs, and places unless all are sent."""
        size = places.nbytes(*self.blocks(slot, count))
        of_places = [Field((size,), torch.uint8)] if size else []
        return [Field(value_shape(count, coded=bool(codecs)), dtype, codecs), *of_places]

    def payload(self, values_K: Tensor, blocks_B: Tensor, slot: Slot, codecs: Codecs) -> Payload:
        """Returns the payload of the entries of these blocks."""
        blocks, chosen = self.blocks(slot, len(values_K))
        values = in_rows(values_K) if codecs else values_K
        return [values] if chosen == blocks else [values, places.packed(blocks_B, blocks)]

    def read(self, tensors: Sequence[Tensor], slot: Slot, count: int) -> Entries:
        """Returns the entries.

        Raises:
            ValueError: The bytes are not those of valid places.
        """
        values_K, *content = tensors[0].flatten()[:count], *tensors[1:]
        packed = (
            content[0] if content else torch.empty(0, dtype=torch.uint8, device=values_K.device)
        )
        blocks_B = places.unpacked(packed, *self.blocks(slot, count))
        shape = slot.groups, slot.outputs, slot.inputs
        return Entries(values_K, self.places(blocks_B, slot.numel), shape)

    def places(self, blocks_B: Tensor, numel: int) -> Tensor:
        """Returns the places of all entries of these blocks."""
        return blocks_B if self.block == 1 else entries_of(blocks_B, numel, self.block)

    def blocks(self, slot: Slot, count: int) -> tuple[int, int]:
        """Returns the number of blocks of a slot, and the number of blocks with `count` entries."""
        return -(-slot.numel // self.block), -(-count // self.block)


def value_shape(count: int, *, coded: bool) -> tuple[int, ...]:
    """Returns (count,), or for codecs the shape of few rows of about equal length."""
    rows = -(-count // _WIDTH)
    return (rows, -(-count // rows)) if coded else (count,)


def in_rows(values_K: Tensor) -> Tensor:
    """Returns the values in rows for codecs, padded with zeros."""
    rows, width = value_shape(len(values_K), coded=True)
    return pad(values_K, (0, rows * width - len(values_K))).view(rows, width)
