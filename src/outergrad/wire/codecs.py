"""What a codec is, and those that round or pick single numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["BF16", "Codec", "Int8", "Plain", "TopK"]

_STEPS = 127
"""Of int8 on either side of zero: -128 is left out, so that a row and its negative are alike."""


class Plain(NamedTuple):
    """A tensor as it stands in a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@runtime_checkable
class Codec(Protocol):
    """How a tensor of rows is written: in tensors that follow from shape and dtype alone.

    Sites agree on the lengths of messages before they compute them. The first tensor that is
    written holds the values, which the next codec encodes in turn; the others go as they are.
    Zeros everywhere have to mean rows of zeros, and what is not finite must not come back finite.
    """

    rounds_to: ClassVar[torch.dtype | None]
    """The dtype that each number is rounded to, if that is all: what is written can be added up,
    and what is lost, in proportion to each number, need not be remembered."""
    picks: ClassVar[bool]
    """Whether it leaves values out, in their own dtype; if not, it writes all in another one."""

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Plain]:
        """What a tensor of this shape, (..., R, W), is written as."""
        ...

    def encode(self, rows: Tensor) -> list[Tensor]:
        """The tensors that are written, each of its dtype or wider."""
        ...

    def decode(self, written: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """The rows, from what `encode` wrote of a tensor of this shape."""
        ...


@dataclass(frozen=True, kw_only=True)
class BF16:
    """Rounds to bfloat16: half the bytes of float32, an error of at most 2⁻⁸ of each number."""

    rounds_to: ClassVar[torch.dtype | None] = torch.bfloat16
    picks: ClassVar[bool] = False

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Plain]:
        """The same numbers."""
        return [Plain(shape, torch.bfloat16)]

    def encode(self, rows: Tensor) -> list[Tensor]:
        """Rounds to nearest."""
        return [rows.to(torch.bfloat16)]

    def decode(self, written: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """In float32."""
        return written[0].float()


@dataclass(frozen=True, kw_only=True)
class Int8:
    """Rounds to whole multiples of 1/127 of each row's largest magnitude: a quarter of float32.

    The error is at most half such a step, whatever the size of the number: what is smaller than
    that comes out as zero. A row with a number that is not finite comes out as NaN.
    """

    rounds_to: ClassVar[torch.dtype | None] = None
    picks: ClassVar[bool] = False

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Plain]:
        """The multiples, and a step per row."""
        return [Plain(shape, torch.int8), Plain((*shape[:-1], 1), torch.float32)]

    def encode(self, rows: Tensor) -> list[Tensor]:
        """Rounds to nearest."""
        largest = rows.abs().amax(dim=-1, keepdim=True).float()
        smallest = torch.finfo(torch.float32).tiny  # a row of zeros has a step, too
        step = torch.where(largest.isfinite(), largest / _STEPS, math.nan).clamp_min(smallest)
        multiples = (rows / step).round().clamp(-_STEPS, _STEPS).nan_to_num(0.0)
        return [multiples.to(torch.int8), step]

    def decode(self, written: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """In float32."""
        multiples, step = written
        return multiples * step


@dataclass(frozen=True)
class TopK:
    """The entries of largest magnitude of each row, with their places; the others count as zero.

    Attributes:
        fraction: of the entries of a row, in (0, 1]; at least one is sent. A place costs two bytes
            in rows of up to 32768 entries, and four in longer ones.
    """

    rounds_to: ClassVar[torch.dtype | None] = None
    picks: ClassVar[bool] = True

    fraction: float

    def __post_init__(self) -> None:
        """Checks the settings."""
        if not 0 < self.fraction <= 1:
            raise ValueError(f"TopK: fraction={self.fraction!r}; use a number in (0, 1]")

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Plain]:
        """The values, and their places in the row."""
        *rows, width = shape
        picked = (*rows, self._count(width))
        short = width <= torch.iinfo(torch.int16).max + 1
        return [Plain(picked, dtype), Plain(picked, torch.int16 if short else torch.int32)]

    def encode(self, rows: Tensor) -> list[Tensor]:
        """Numbers that are not finite count as the largest."""
        width = rows.shape[-1]
        _, places = rows.abs().topk(self._count(width), dim=-1, sorted=False)
        return [rows.gather(-1, places), places]

    def decode(self, written: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """In the dtype of the values.

        Raises:
            ValueError: a place is outside of its row.
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
        """K, of W entries."""
        return min(width, max(1, round(self.fraction * width)))
