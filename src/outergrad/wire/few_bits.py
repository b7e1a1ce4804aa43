"""Codecs that encode rows in two to four bits per number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outergrad.wire.codecs import Plain
from outergrad.wire.packing import EIGHT, grouped, packed, unpacked

__all__ = ["Int2", "Int3", "Int4"]

_GROUP = 64
"""Numbers that share a step."""


class FewBits:
    """Encodes numbers in b bits: -2^(b-1) ... 2^(b-1) - 1 times a bfloat16 step per group of 64.

    A step has the sign that puts the largest magnitude of its group at the negative end, the longer
    one, of this range. So all 2^b multiples are used, one of them is zero, and a row and its
    negative encode alike. Numbers are first rounded to multiples of two steps: one that clips
    nothing, and one that clips magnitudes above `clip` times the largest. For each of the two sets
    of multiples, the step with the least squared error follows in closed form. The better one of
    these steps is sent, and numbers are rounded to multiples of it, within the range. A group with
    a non-finite number is decoded as NaN.
    """

    rounds_to: ClassVar[torch.dtype | None] = None
    picks: ClassVar[bool] = False
    group: ClassVar[int] = _GROUP
    """Length of the parts of a row that are encoded like rows of their own."""
    bits: ClassVar[int]
    clip: ClassVar[float]
    """Clipping level of the second trial step, as a fraction of a group's largest magnitude."""

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Plain]:
        """Returns the packed multiples, and a step per group; no group spans two rows."""
        *rows, width = shape
        packed = self.bits * math.ceil(width / EIGHT)
        steps = math.ceil(width / _GROUP)
        return [Plain((*rows, packed), torch.uint8), Plain((*rows, steps), torch.bfloat16)]

    def encode(self, rows: Tensor) -> list[Tensor]:
        """Rounds to the nearest multiple in the range."""
        half, width = self._half, rows.shape[-1]
        x = grouped(rows.float(), _GROUP)
        steps = self._steps(x)
        divisors = steps.float().masked_fill_(steps == 0, math.inf)
        multiples = (x / divisors).round_().clamp_(-half, half - 1).nan_to_num_(0.0)
        codes = multiples.to(torch.int8).flatten(-2)[..., : math.ceil(width / EIGHT) * EIGHT]
        return [self._packed(codes.contiguous()), steps[..., 0]]

    def decode(self, written: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """Returns the rows in float32."""
        packed, steps = written
        multiples = grouped(self._unpacked(packed)[..., : shape[-1]], _GROUP)
        return (multiples * steps.float()[..., None]).flatten(-2)[..., : shape[-1]]

    @property
    def _half(self) -> int:
        return 1 << (self.bits - 1)

    def _steps(self, x: Tensor) -> Tensor:
        """Returns the step of each group, (..., groups, 1), in bfloat16."""
        first = _largest(x) / -self._half
        y = x / torch.where(first == 0, math.inf, first)
        whole, factor = self._fit(y, y.round())
        clipped, smaller = self._fit(y, (y / self.clip).round_())
        factor = torch.where(clipped > whole, smaller, factor).nan_to_num_(0.0)
        most = torch.finfo(torch.bfloat16).max / self._half
        return (first * factor).clamp_(-most, most).to(torch.bfloat16)

    def _fit(self, y: Tensor, multiples: Tensor) -> tuple[Tensor, Tensor]:
        """Returns how well multiples fit numbers, and the factor on the step that errs least.

        With multiples q of numbers y, the squared error of s q is least for s = y q / q q. It is
        then (y q)^2 / q q less than that of zeros, whose root (with the sign of s) is the fit.
        """
        multiples.clamp_(-self._half, self._half - 1)
        norms = torch.linalg.vector_norm(multiples, dim=-1, keepdim=True)
        fits = multiples.mul_(y).sum(dim=-1, keepdim=True) / norms
        return fits, fits / norms

    def _packed(self, codes: Tensor) -> Tensor:
        return packed(codes, self.bits)

    def _unpacked(self, found: Tensor) -> Tensor:
        return unpacked(found, self.bits)


def _largest(x: Tensor) -> Tensor:
    """Returns each group's number of largest magnitude, (..., groups, 1); NaN if not finite."""
    most, least = x.amax(dim=-1, keepdim=True), x.amin(dim=-1, keepdim=True)
    is_positive = torch.where(most == -least, x[..., :1] >= 0, most > -least)
    largest = torch.where(is_positive, most, least)
    return torch.where(largest.isfinite(), largest, math.nan)


@dataclass(frozen=True, kw_only=True)
class Int4(FewBits):
    """Encodes numbers in four bits, with a step per 64 numbers: 7.5 times fewer bytes than float32.

    The error of normally distributed rows is 9 % of their norm (`benchmarks/encode.py`). Choose
    it for methods with error feedback.
    """

    bits: ClassVar[int] = 4
    clip: ClassVar[float] = 0.9

    def _packed(self, codes: Tensor) -> Tensor:
        """Packs into the same bytes in half of the passes: a byte holds two adjacent numbers."""
        lower, upper = codes.view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
        return (lower & 15).bitwise_or_(upper << 4)

    def _unpacked(self, found: Tensor) -> Tensor:
        codes = torch.stack((found & 15, found >> 4), dim=-1).flatten(-2)
        return codes.bitwise_xor_(self._half).view(torch.int8).sub_(self._half)


@dataclass(frozen=True, kw_only=True)
class Int3(FewBits):
    """Like `Int4` in three bits: 9.8 times fewer bytes than float32, an error of 18 %."""

    bits: ClassVar[int] = 3
    clip: ClassVar[float] = 0.85


@dataclass(frozen=True, kw_only=True)
class Int2(FewBits):
    """Like `Int4` in two bits: 14 times fewer bytes than float32, an error of 36 %."""

    bits: ClassVar[int] = 2
    clip: ClassVar[float] = 0.7
