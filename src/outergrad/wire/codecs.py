"""The codec protocol, and codecs that round or pick single numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["BF16", "Codec", "Int8", "Plain", "TopK"]

_STEPS = 127
"""Multiples in int8 on either side of zero, without -128: a row and its negative encode alike."""


class Plain(NamedTuple):
    """Shape and dtype of a tensor in a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@runtime_checkable
class Codec(Protocol):
    """An encoding of a tensor of rows, in tensors that follow from its shape and dtype alone.

    Sites agree on the lengths of messages before they compute them. The first encoded tensor holds
    the values, which the next codec encodes in turn; the others are sent unchanged. Encoded tensors
    of zeros must decode to rows of zeros, and non-finite numbers must not decode to finite ones.
    """

    rounds_to: ClassVar[torch.dtype | None]
    """Dtype that each number is rounded to, if the codec does nothing else; otherwise None. Encoded
    values can then be summed. The loss is proportional to each number and needs no error
    feedback."""
    picks: ClassVar[bool]
    """True if it omits values and keeps the dtype of the others; False if it encodes all values in
    another dtype."""

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Plain]:
        """Returns the encoded tensors' shapes and dtypes for rows of this shape, (..., R, W)."""
        ...

    def encode(self, rows: Tensor) -> list[Tensor]:
        """Returns the encoded tensors, each in the dtype from `tensors` or a wider one."""
        ...

    def decode(self, written: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """Returns the rows, of the given shape, from the tensors that `encode` returned."""
        ...


@dataclass(frozen=True, kw_only=True)
class BF16:
    """Rounds to bfloat16: half the bytes of float32, an error of at most 2⁻⁸ of each number."""

    rounds_to: ClassVar[torch.dtype | None] = torch.bfloat16
    picks: ClassVar[bool] = False

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Plain]:
        """Returns the rows' shape in bfloat16."""
        return [Plain(shape, torch.bfloat16)]

    def encode(self, rows: Tensor) -> list[Tensor]:
        """Rounds to nearest."""
        return [rows.to(torch.bfloat16)]

    def decode(self, written: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """Returns the rows in float32."""
        return written[0].float()


@dataclass(frozen=True, kw_only=True)
class Int8:
    """Rounds to multiples of 1/127 of each row's largest magnitude: a quarter of float32's bytes.

    The error is at most half such a step, whatever the size of the number: a number smaller than
    that becomes zero. A row with a non-finite number is decoded as NaN.
    """

    rounds_to: ClassVar[torch.dtype | None] = None
    picks: ClassVar[bool] = False

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Plain]:
        """Returns the multiples in int8, and a float32 step per row."""
        return [Plain(shape, torch.int8), Plain((*shape[:-1], 1), torch.float32)]

    def encode(self, rows: Tensor) -> list[Tensor]:
        """Rounds to nearest."""
        largest = rows.abs().amax(dim=-1, keepdim=True).float()
        smallest = torch.finfo(torch.float32).tiny  # no division by 0 in a row of zeros
        step = torch.where(largest.isfinite(), largest / _STEPS, math.nan).clamp_min(smallest)
        multiples = (rows / step).round().clamp(-_STEPS, _STEPS).nan_to_num(0.0)
        return [multiples.to(torch.int8), step]

    def decode(self, written: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """Returns the rows in float32."""
        multiples, step = written
        return multiples * step


@dataclass(frozen=True)
class TopK:
    """Sends the entries of largest magnitude of each row, with their indices; the rest become zero.

    Attributes:
        fraction: share of a row's entries to send, in (0, 1]; at least one entry is sent. An index
            costs two bytes in rows of up to 32768 entries, and four in longer ones.
    """

    rounds_to: ClassVar[torch.dtype | None] = None
    picks: ClassVar[bool] = True

    fraction: float

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"TopK: fraction={self.fraction!r}; use a number in (0, 1]")

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Plain]:
        """Returns the values in their dtype, and their indices in the row."""
        *rows, width = shape
        picked = (*rows, self._count(width))
        short = width <= torch.iinfo(torch.int16).max + 1
        return [Plain(picked, dtype), Plain(picked, torch.int16 if short else torch.int32)]

    def encode(self, rows: Tensor) -> list[Tensor]:
        """Picks the largest magnitudes; non-finite numbers count as the largest."""
        width = rows.shape[-1]
        _, places = rows.abs().topk(self._count(width), dim=-1, sorted=False)
        return [rows.gather(-1, places), places]

    def decode(self, written: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """Returns the rows in the dtype of the values.

        Raises:
            ValueError: an index is outside of its row.
        """
        values, places = written
        if places.numel():
            lowest, highest = (int(t) for t in places.aminmax())
            if lowest < 0 or highest >= shape[-1]:
                raise ValueError(
                    f"TopK: a place {lowest if lowest < 0 else highest} in a row of {shape[-1]}"
                )
        return values.new_zeros(shape).scatter_(-1, places.long(), values)

    def _count(self, width: int) -> int:
        return min(width, max(1, round(self.fraction * width)))
