"""What a site sends of one slot: how it stands in a message, and what is read of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outergrad.core.coding import Codecs, Encoded, Field
from outergrad.core.types import Factors, Slot


class Entries(NamedTuple):
    """A few entries of a weight gradient; the others count as zero.

    Attributes:
        values_K: the entries.
        places_K: where they stand in the flattened gradient, int64, ascending and distinct.
        shape: of the gradient, (G, O, I).
    """

    values_K: Tensor
    places_K: Tensor
    shape: tuple[int, int, int]


Arrived = Factors | Tensor | Entries
"""A weight gradient as it is read of a message; a tensor is the gradient itself, (G, O, I).
Of a block it is a tensor of bytes, of which every site computes the gradients."""


Payload = Sequence[Tensor | Encoded | None]
"""What `Compressor.compress` makes of one slot: a tensor per field, which is then encoded unless it
is already, or None for a field of zeros. One that is smaller than its field leaves zeros behind it.
"""


class EncodedRows(NamedTuple):
    """Factors whose rows are encoded already, and maybe the bias gradient."""

    d_GRO: Encoded
    a_GRI: Encoded
    b_GO: Tensor | Encoded | None = None


class Form(Protocol):
    """One kind of payload. Equal ones are alike, as those of a frozen dataclass."""

    def fields(
        self, slot: Slot, count: int, dtype: torch.dtype, bias: torch.dtype | None, codecs: Codecs
    ) -> list[Field]:
        """The tensors of a payload: their lengths are agreed before there is one.

        Args:
            slot: that it is of.
            count: how many rows, or entries, as `Compressor.sent_rows` says; 1 or more.
            dtype: of its numbers, before they are encoded.
            bias: dtype of the bias gradient; None where it does not travel along.
            codecs: that its numbers go through.
        """
        ...

    def read(self, tensors: Sequence[Tensor], slot: Slot, count: int) -> Arrived:
        """The gradient, from what the fields hold.

        Args:
            tensors: of the fields, decoded.
            slot: as for `fields`.
            count: as for `fields`.

        Raises:
            ValueError: they hold none.
        """
        ...


class FactorRows:
    """Rows of deltas and activations; of an embedding, of deltas and ids."""

    def fields(
        self, slot: Slot, count: int, dtype: torch.dtype, bias: torch.dtype | None, codecs: Codecs
    ) -> list[Field]:
        """Deltas, activations or ids, and the bias gradient; ids and biases are not encoded."""
        deltas = Field((slot.groups, count, slot.outputs), dtype, codecs)
        if slot.lookup:
            return [deltas, Field((count,), torch.int64)]
        activations = Field((slot.groups, count, slot.inputs), dtype, codecs)
        biases = [Field((slot.groups, slot.outputs), bias)] if bias else []
        return [deltas, activations, *biases]

    def read(self, tensors: Sequence[Tensor], slot: Slot, count: int) -> Factors:
        """The factors; ids are checked."""
        factors = Factors(*tensors)
        if slot.lookup:
            _check_ids(slot, factors.a_GRI)
        return factors


class Bytes:
    """So many bytes, which say themselves what they mean."""

    def fields(
        self, slot: object, count: int, dtype: torch.dtype, bias: torch.dtype | None, codecs: Codecs
    ) -> list[Field]:
        """One of that length: what they hold was encoded before."""
        return [Field((count,), torch.uint8)]

    def read(self, tensors: Sequence[Tensor], slot: object, count: int) -> Tensor:
        """As they came."""
        return tensors[0]


FACTOR_ROWS, BYTES = FactorRows(), Bytes()


def _check_ids(slot: Slot, ids_R: Tensor) -> None:
    lowest, highest = torch.stack(ids_R.aminmax()).tolist()
    if lowest < 0 or highest >= slot.inputs:
        outside = lowest if lowest < 0 else highest
        raise ValueError(f"{slot.weight!r} has {slot.inputs} rows, and none of id {outside}")
