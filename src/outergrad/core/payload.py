"""Payload of one slot: its tensors in a message, and the gradient that is read from it."""

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
        places_B: indices of blocks of consecutive entries in the flattened gradient, int64,
            ascending and distinct.
        shape: of the gradient, (G, O, I).
        block: entries of a block; it divides the gradient's number of entries.
    """

    values_K: Tensor
    places_B: Tensor
    shape: tuple[int, int, int]
    block: int = 1


Arrived = Factors | Tensor | Entries
"""A weight gradient as read from a message; a tensor is the gradient itself, (G, O, I).
For a block it is a tensor of bytes, from which every site computes the gradients."""


Payload = Sequence[Tensor | Encoded | None]
"""The result of `Compressor.compress` for one slot, with one element per field.
A plain tensor is encoded when it is written, an `Encoded` one already is. None is a field of
zeros. A tensor smaller than its field is followed by zeros."""


class EncodedRows(NamedTuple):
    """Factors whose rows are already encoded, with an optional bias gradient."""

    d_GRO: Encoded
    a_GRI: Encoded
    b_GO: Tensor | Encoded | None = None


class Form(Protocol):
    """Layout of one kind of payload. Instances that compare equal are interchangeable."""

    def fields(
        self, slot: Slot, count: int, dtype: torch.dtype, bias: torch.dtype | None, codecs: Codecs
    ) -> list[Field]:
        """Returns the tensors of a payload, whose sizes are agreed before it is computed.

        Args:
            slot: of the payload.
            count: number of rows, or entries, as in `Compressor.sent_rows`; 1 or more.
            dtype: of the numbers before encoding.
            bias: dtype of the bias gradient; None where it is not sent.
            codecs: that the numbers are encoded with.
        """
        ...

    def read(self, tensors: Sequence[Tensor], slot: Slot, count: int) -> Arrived:
        """Returns the gradient held by the decoded fields.

        Args:
            tensors: of the fields, decoded.
            slot: as for `fields`.
            count: as for `fields`.

        Raises:
            ValueError: the fields hold no valid gradient.
        """
        ...


class FactorRows:
    """Rows of deltas and activations; for an embedding, rows of deltas and ids."""

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
        """Returns the factors, in one dtype; raises if an id is outside the embedding's table."""
        factors = Factors(*tensors)
        d_GRO, a_GRI, b_GO = factors
        if slot.lookup:
            _check_ids(slot, a_GRI)
        elif d_GRO.dtype != a_GRI.dtype:
            dtype = torch.promote_types(d_GRO.dtype, a_GRI.dtype)
            return Factors(d_GRO.to(dtype), a_GRI.to(dtype), b_GO)
        return factors


class CanonicalRows(FactorRows):
    """Factors of which one is orthonormal: in half the bytes it has three more digits in float16.

    A number in bfloat16 has 8 bits of precision and the range of float32, which numbers up to 1 do
    not need: rounded to 11 bits, the orthonormal factor adds nothing to the error of the other.
    """

    def fields(
        self, slot: Slot, count: int, dtype: torch.dtype, bias: torch.dtype | None, codecs: Codecs
    ) -> list[Field]:
        """As factors; where they are in bfloat16, the narrower one is in float16."""
        fields = super().fields(slot, count, dtype, bias, codecs)
        if dtype == torch.bfloat16 and not slot.lookup:
            narrower = 0 if slot.outputs <= slot.inputs else 1  # as `linalg.power.canonical` has it
            fields[narrower] = fields[narrower]._replace(dtype=torch.float16)
        return fields


class Bytes:
    """A payload of `count` self-describing bytes."""

    def fields(
        self, slot: object, count: int, dtype: torch.dtype, bias: torch.dtype | None, codecs: Codecs
    ) -> list[Field]:
        """One field of `count` bytes; their content was encoded before."""
        return [Field((count,), torch.uint8)]

    def read(self, tensors: Sequence[Tensor], slot: object, count: int) -> Tensor:
        """Returns the bytes unchanged."""
        return tensors[0]


FACTOR_ROWS, CANONICAL_ROWS, BYTES = FactorRows(), CanonicalRows(), Bytes()


def _check_ids(slot: Slot, ids_R: Tensor) -> None:
    lowest, highest = torch.stack(ids_R.aminmax()).tolist()
    if lowest < 0 or highest >= slot.inputs:
        outside = lowest if lowest < 0 else highest
        raise ValueError(f"{slot.weight!r} has {slot.inputs} rows, and none of id {outside}")
