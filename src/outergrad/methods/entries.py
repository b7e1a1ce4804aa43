"""Payloads of a few entries of a gradient: their values, and their places where these are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from outergrad.core.coding import Codecs, Encoded, Field, decode_all, encode_all
from outergrad.core.payload import Entries, Payload
from outergrad.core.types import Slot
from outergrad.linalg.selection import entries_of
from outergrad.messages import places

_WIDTH = 256
"""Largest number of values in a row for codecs: `og.wire.Int8` has one step per row."""


class Picked(NamedTuple):
    """Places of blocks of consecutive entries, which fill the flattened gradient.

    Attributes:
        places_B: Numbers of blocks, sorted.
        block: Entries of a block.
    """

    places_B: Tensor
    block: int

    def of(self, flat_N: Tensor) -> Tensor:
        """Returns the entries, (K,)."""
        return flat_N.view(-1, self.block)[self.places_B].view(-1)

    def add(self, values_K: Tensor, flat_N: Tensor, times: float = 1) -> None:
        """Adds values to the entries, in place."""
        of_blocks = values_K.view(-1, self.block)
        flat_N.view(-1, self.block).index_add_(0, self.places_B, of_blocks, alpha=times)

    def cleared(self, flat_N: Tensor) -> Tensor:
        """Returns a copy in which the entries are zero."""
        return flat_N.view(-1, self.block).index_fill(0, self.places_B, 0.0).view(-1)

    def entries(self, values_K: Tensor, slot: Slot) -> Entries:
        """Returns these values as entries of a gradient."""
        shape = slot.groups, slot.outputs, slot.inputs
        return Entries(values_K, self.places_B, shape, self.block)


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

    def payload(self, values: Tensor | Encoded, blocks_B: Tensor, slot: Slot) -> Payload:
        """Returns the payload of the entries of these blocks, in order."""
        blocks, _ = self.blocks(slot, slot.numel)
        return [values] if len(blocks_B) == blocks else [values, places.packed(blocks_B, blocks)]

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
        return self.picked(blocks_B, slot.numel).entries(values_K, slot)

    def picked(self, blocks_B: Tensor, numel: int) -> Picked:
        """Returns the entries of these blocks: one block if these are all of them.

        Where the last block is short, some of them have a place each.
        """
        if len(blocks_B) == -(-numel // self.block):
            return Picked(blocks_B[:1], numel)
        if numel % self.block == 0:
            return Picked(blocks_B, self.block)
        return Picked(entries_of(blocks_B, numel, self.block), 1)

    def blocks(self, slot: Slot, count: int) -> tuple[int, int]:
        """Returns the number of blocks of a slot, and the number of blocks with `count` entries."""
        return -(-slot.numel // self.block), -(-count // self.block)


Drawn = Callable[[Slot, int, torch.device], Tensor]
"""Returns the numbers of the blocks of so many entries of a slot, sorted, alike on all sites."""


@dataclass(frozen=True)
class DrawnForm:
    """Values alone: receivers draw the same places.

    Attributes:
        entries: Gives the numbers of blocks, and the places of their entries.
        drawn: Draws blocks.
    """

    entries: EntriesForm
    drawn: Drawn

    def fields(
        self, slot: Slot, count: int, dtype: torch.dtype, bias: torch.dtype | None, codecs: Codecs
    ) -> list[Field]:
        """Returns the field of the values, in rows for codecs."""
        return [Field(value_shape(count, coded=bool(codecs)), dtype, codecs)]

    def payload(self, values: Tensor | Encoded, blocks_B: Tensor, slot: Slot) -> Payload:
        """Returns the payload of these values."""
        return [values]

    def read(self, tensors: Sequence[Tensor], slot: Slot, count: int) -> Entries:
        """Returns the entries."""
        values_K = tensors[0].flatten()[:count]
        blocks_B = self.drawn(slot, count, values_K.device)
        return self.entries.picked(blocks_B, slot.numel).entries(values_K, slot)


def value_shape(count: int, *, coded: bool) -> tuple[int, ...]:
    """Returns (count,), or for codecs the shape of few rows of about equal length."""
    rows = -(-count // _WIDTH)
    return (rows, -(-count // rows)) if coded else (count,)


def written(
    codecs: Codecs, values: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> list[tuple[Tensor | Encoded, Tensor]]:
    """Returns the values of each payload as they travel, and as receivers decode them.

    Args:
        codecs: Codecs of the values.
        values: Values of each payload, (K,), float32 or float64.
        dtypes: Dtypes in which they travel without codecs.
    """
    if not codecs:
        pairs = zip(values, dtypes, strict=True)
        return [(values_K, values_K.to(dtype).to(values_K.dtype)) for values_K, dtype in pairs]
    rows = [_in_rows(values_K) for values_K in values]
    sent = encode_all(codecs, rows)  # one call for all: it is short, and there may be hundreds
    arrives = decode_all(codecs, sent, rows)
    whole = [
        rows.flatten()[: len(values_K)].to(values_K.dtype)
        for rows, values_K in zip(arrives, values, strict=True)
    ]
    return list(zip(sent, whole, strict=True))


def _in_rows(values_K: Tensor) -> Tensor:
    """Returns the values in rows for codecs, padded with zeros."""
    rows, width = value_shape(len(values_K), coded=True)
    if missing := rows * width - len(values_K):
        values_K = pad(values_K, (0, missing))
    return values_K.view(rows, width)
