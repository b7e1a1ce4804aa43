"""Matrices that are remembered in few bits a number, right on average."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

_GROUP = 64
"""Numbers that share a step."""
_HALF = 32
"""Multiples of a step lie between this and its negative."""
_RANGE, _MOST = 96, 1000
"""Powers of two within which float64 numbers are rounded as they are, and by which they are
multiplied beyond: both ways, without leaving the range of float64."""
_TOGETHER = 4
"""Rows whose highest bits share bytes."""
_PLACES, _TURNS = 0xC13FA9A9, 0x91E10DA5
"""2^32 over the plastic number and over its square: sums of their multiples are spread evenly."""
_LOW, _HIGH, _SIGN = 0x0F0F0F0F0F0F0F0F, 0x0303030303030303, 0x2020202020202020
"""Of each byte of a word of eight, its lowest four bits, its lowest two, and the sixth."""


@dataclass(frozen=True)
class Packed:
    """A matrix in six bits and a quarter a number, alone or with others.

    Attributes:
        written: what `_encoded` made of its numbers, row behind row, and of the others'.
        shape: of the matrix.
        start: the first of its numbers.
        exponent: the power of two that its numbers are to be multiplied by; not 0 only of float64
            numbers that are out of float32's range.
    """

    written: tuple[Tensor, Tensor]
    shape: torch.Size
    start: int = 0
    exponent: int = 0

    def unpacked(self) -> Tensor:
        """In float32, or in float64 where that is out of its range."""
        return self._cut(_decoded(*self.written))

    def _cut(self, numbers: Tensor) -> Tensor:
        found = numbers[self.start : self.start + self.shape.numel()].view(self.shape)
        return found.double() * 2.0**self.exponent if self.exponent else found


def packed(matrices: Sequence[Tensor], turn: int) -> list[Packed]:
    """Matrices of finite numbers in few bits, all in one piece.

    Args:
        matrices: any; small ones, or one alone.
        turn: another one in each step: it decides how they are rounded.
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
    """All of them; what is in one piece is read once."""
    read: dict[int, Tensor] = {}
    found: list[Tensor] = []
    for one in packed_K:
        numbers = read.get(id(one.written))
        if numbers is None:
            numbers = read[id(one.written)] = _decoded(*one.written)
        found.append(one._cut(numbers))
    return found


def _exponent(matrix: Tensor) -> int:
    """That of the largest number, if it is out of the range in which float32 has all its digits."""
    if matrix.dtype != torch.float64 or not matrix.numel():
        return 0
    exponent = math.frexp(matrix.abs().amax().item())[1]
    return 0 if abs(exponent) < _RANGE else max(-_MOST, min(exponent, _MOST))


def _encoded(rows: Tensor, counts: tuple[int, ...], turn: int) -> tuple[Tensor, Tensor]:
    """Multiples of a step per row, each the upper one as often as the number is near it.

    No number is clipped. What is drawn follows from the place and the turn alone: the same training
    comes out again, and what a place gains in every step adds up, however little.

    Returns:
        Their lowest four bits, two in a byte, and behind these their highest two, four in a byte;
        and the steps in bfloat16, (R, 1).
    """
    most = (_HALF - 1) * (1 - 2**-7)  # a step is rounded, too
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
    """The other way round, in float32, 1-D."""
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
    """In [-1/2, 1/2), evenly spread over places and, at each place, over the turns, (64, 64)."""
    places = torch.arange(_GROUP * _GROUP, dtype=torch.int64)
    words = (places * _PLACES + turn * _TURNS) >> 16 & 0xFFFF
    return (words * 2.0**-16 - 0.5).view(_GROUP, _GROUP).to(device)


@lru_cache(maxsize=256)
def _rows_of(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Of so many rows of each matrix, which of the draws each has, (R,)."""
    rows = torch.cat([torch.arange(count, dtype=torch.int32) for count in counts])
    return (rows % _GROUP).to(device)
