"""Matrices that are remembered in few bits a number, right on average."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from outergrad.wire.few_bits import FewBits

_GROUP = FewBits.group
_PLACES, _TURNS = 0xC13FA9A9, 0x91E10DA5
"""2^32 over the plastic number and over its square: sums of their multiples are spread evenly."""


@dataclass(frozen=True)
class SixBits(FewBits):
    """Numbers in six bits, each rounded up as often as it is near the upper multiple of its step.

    No number of a group is clipped. What is drawn follows from the place and the turn alone: the
    same training comes out again, and what a place gains in every step adds up, however little.

    Attributes:
        turn: another one in each step.
    """

    bits: ClassVar[int] = 6
    turn: int = 0

    def encode(self, rows: Tensor) -> list[Tensor]:
        """Of rows of 64 in float32, (R, 64)."""
        most = (self._half - 1) * (1 - 2**-7)  # a step is rounded, too
        steps = (rows.abs().amax(dim=-1, keepdim=True) / most).to(torch.bfloat16)
        multiples = rows / steps.float().masked_fill_(steps == 0, math.inf)
        codes = multiples.add_(_draws(multiples, self.turn)).floor_().to(torch.int8)
        return [self._packed(codes), steps]


@dataclass(frozen=True)
class Packed:
    """A matrix in six bits and a quarter a number.

    Attributes:
        written: what `SixBits` made of its numbers, row behind row.
        shape: of the matrix.
    """

    written: tuple[Tensor, Tensor]
    shape: torch.Size

    def unpacked(self) -> Tensor:
        """In float32."""
        rows = SixBits().decode(self.written, (len(self.written[0]), _GROUP))
        return rows.flatten()[: self.shape.numel()].view(self.shape)


def packed(matrix: Tensor, turn: int) -> Packed:
    """A matrix of finite numbers in few bits."""
    numbers = matrix.float().flatten()
    missing = -len(numbers) % _GROUP
    rows = (pad(numbers, (0, missing)) if missing else numbers).view(-1, _GROUP)
    codes, steps = SixBits(turn).encode(rows)
    return Packed((codes, steps), matrix.shape)


def _draws(like: Tensor, turn: int) -> Tensor:
    """In [0, 1) with 16 bits, evenly spread over places and, at each place, over the turns."""
    places = torch.arange(like.numel(), dtype=torch.int32, device=like.device).view_as(like)
    spread = places * _signed(_PLACES) + _signed(turn * _TURNS)
    return (spread >> 16).bitwise_and_(0xFFFF) * 2.0**-16


def _signed(word: int) -> int:
    """The lowest 32 bits, as a signed integer."""
    return (word + 2**31) % 2**32 - 2**31
