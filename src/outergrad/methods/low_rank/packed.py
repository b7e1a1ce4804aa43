"""Matrices packed in few bits per number, with rounding that is right on average."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

_GROUP = 64
"""Numbers that share a quantisation step."""
_HALF = 32
"""Bound of the multiples of a step, in magnitude."""
_RANGE, _MOST = 96, 1000
"""Exponents up to which float64 numbers are not scaled, and the largest exponent of a scale beyond:
both the scale and its inverse are in the range of float64."""
_TOGETHER = 4
"""Rows whose highest bits share bytes."""
_PLACES, _TURNS = 0xC13FA9A9, 0x91E10DA5
"""2^32 over the plastic number and over its square: sums of their multiples are spread evenly."""
_LOW, _HIGH, _SIGN = 0x0F0F0F0F0F0F0F0F, 0x0303030303030303, 0x2020202020202020
"""Masks of each byte of a word of eight: the lowest four bits, the lowest two, and the sixth."""


@dataclass(frozen=True)
class Packed:
    """A matrix in six bits and a quarter per number, in a buffer that others may share.

    Attributes:
        written: Result of `_encoded` for its numbers, row behind row, and those of the others.
        shape: Shape of the matrix.
        start: Index of its first number.
        exponent: Power of two to multiply its numbers by; not 0 only for float64 numbers that are
            out of float32's range.
    """

    written: tuple[Tensor, Tensor]
    shape: torch.Size
    start: int = 0
    exponent: int = 0

    def unpacked(self) -> Tensor:
        """Returns the matrix in float32, or in float64 where that is out of its range."""
        return self._cut(_decoded(*self.written))

    def _cut(self, numbers: Tensor) -> Tensor:
        found = numbers[self.start : self.start + self.shape.numel()].view(self.shape)
        return found.double() * 2.0**self.exponent if self.exponent else found


def packed(matrices: Sequence[Tensor], turn: int) -> list[Packed]:
    """Packs matrices of finite numbers in one buffer.

    Args:
        matrices: Small matrices, or a single one of any size.
        turn: Number that differs between steps and decides how numbers are rounded.
    """
    exponents = [_exponent(matrix) for matrix in matrices]
    pairs = zip(matrices, exponents, strict=True)
    scaled = (matrix * 2.0**-exponent if exponent else matrix for matrix, exponent in pairs)
    numbers = [_padded(matrix.float().flatten()) for matrix in scaled]
    counts = tuple(len(some) // _GROUP for some in numbers)
    if missing := -sum(counts) % _TOGETHER:
        numbers.append(numbers[0].new_zeros(missing * _GROUP))
        counts = *counts, missing
    rows = (torch.cat(numbers) if len(numbers) > 1 else numbers[0]).view(-1, _GROUP)
    written, start, found = _encoded(rows, counts, turn), 0, list[Packed]()
    for matrix, count, exponent in zip(matrices, counts, exponents, strict=False):
        found.append(Packed(written, matrix.shape, start, exponent))
        start += count * _GROUP
    return found


def unpacked(packed_K: Iterable[Packed]) -> list[Tensor]:
    """Returns the matrices, and decodes each shared buffer once."""
    read: dict[int, Tensor] = {}
    found: list[Tensor] = []
    for one in packed_K:
        numbers = read.get(id(one.written))
        if numbers is None:
            numbers = read[id(one.written)] = _decoded(*one.written)
        found.append(one._cut(numbers))
    return found


def _exponent(matrix: Tensor) -> int:
    """Returns the exponent of the largest number if float32 would lose digits of it, else 0."""
    if matrix.dtype != torch.float64 or not matrix.numel():
        return 0
    exponent = math.frexp(matrix.abs().amax().item())[1]
    return 0 if abs(exponent) < _RANGE else max(-_MOST, min(exponent, _MOST))


def _encoded(rows: Tensor, counts: tuple[int, ...], turn: int) -> tuple[Tensor, Tensor]:
    """Rounds numbers to multiples of a step per row, right on average over the turns.

    No number is clipped. The rounding depends on the place and the turn alone: a repeated training
    gives the same bits, and what a place gains in every step adds up, however little.

    Returns:
        The lowest four bits of the multiples, two in a byte, and behind these the highest two, four
        in a byte; and the steps in bfloat16, (R, 1).
    """
    most = (_HALF - 1) * (1 - 2**-7)  # margin, because steps are rounded to bfloat16
    steps = (rows.abs().amax(dim=-1, keepdim=True) / most).to(torch.bfloat16)
    divisors = steps.float().masked_fill_(steps == 0, math.inf)
    draws = _draws(turn, rows.device).index_select(0, _rows_of(counts, rows.device))
    codes = draws.addcdiv_(rows, divisors).round_().to(torch.int8)
    words = codes.view(torch.int64).flatten()
    half, quarter = len(words) // 2, len(words) // 4
    low = (words[half:] & _LOW).bitwise_left_shift_(4).bitwise_or_(words[:half] & _LOW)
    high = (words >> 4).bitwise_and_(_HIGH)
    high = (high[half:] << 4).bitwise_or_(high[:half])
    high = (high[quarter:] << 2).bitwise_or_(high[:quarter])
    return torch.cat([low, high]).view(torch.uint8), steps


def _decoded(written: Tensor, steps: Tensor) -> Tensor:
    """Returns the numbers that `_encoded` wrote, in float32, 1-D."""
    words = written.view(torch.int64)
    half = _GROUP * len(steps) // 16
    low, high = words[:half], words[half:]
    high = torch.cat([high, high >> 2])
    high = torch.cat([high, high >> 4]).bitwise_and_(_HIGH).bitwise_left_shift_(4)
    codes = torch.cat([low, low >> 4]).bitwise_and_(_LOW).bitwise_or_(high)
    codes = codes.bitwise_xor_(_SIGN).view(torch.int8).sub_(_HALF)
    return (codes.view(-1, _GROUP).float() * steps.float()).flatten()


def _padded(numbers: Tensor) -> Tensor:
    missing = -len(numbers) % _GROUP
    return pad(numbers, (0, missing)) if missing else numbers


@lru_cache(maxsize=4)
def _draws(turn: int, device: torch.device) -> Tensor:
    """Returns (64, 64) numbers in [-1/2, 1/2), spread evenly over places and over the turns."""
    places = torch.arange(_GROUP * _GROUP, dtype=torch.int64)
    words = (places * _PLACES + turn * _TURNS) >> 16 & 0xFFFF
    return (words * 2.0**-16 - 0.5).view(_GROUP, _GROUP).to(device)


@lru_cache(maxsize=256)
def _rows_of(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the row of `_draws` for each row of all matrices, (R,), which have `counts` rows."""
    rows = torch.cat([torch.arange(count, dtype=torch.int32) for count in counts])
    return (rows % _GROUP).to(device)
