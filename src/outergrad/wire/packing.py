"""Groups of numbers in a row, and packing of small integers: eight of b bits fill b bytes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

EIGHT = 8
"""Integers that are packed together."""


def grouped(rows: Tensor, size: int) -> Tensor:
    """Reshapes (..., R, W) to (..., R, groups, size), padded with zeros."""
    missing = -rows.shape[-1] % size
    return (pad(rows, (0, missing)) if missing else rows).unflatten(-1, (-1, size))


def packed(codes: Tensor, bits: int) -> Tensor:
    """Packs eight integers, a byte each, into `bits` bytes, the first in the lowest bits.

    Adjacent pairs are joined until eight integers are contiguous, for a 64-bit word at a time.

    Args:
        codes: (..., W), int8, from -2^(bits-1) to 2^(bits-1) - 1, W a multiple of eight.
        bits: from 1 to 4.

    Returns:
        (..., W * bits / 8), uint8.
    """
    *rows, width = codes.shape
    words = codes.flatten().view(torch.int64) & _in_all((1 << bits) - 1, EIGHT)
    for lane, held in _lanes(bits):
        upper = words >> (lane - held) & _in_all(((1 << held) - 1) << held, 2 * lane)
        words = words.bitwise_and_(_in_all((1 << held) - 1, 2 * lane)).bitwise_or_(upper)
    return words.view(torch.uint8).view(*rows, width // EIGHT, EIGHT)[..., :bits].flatten(-2)


def unpacked(found: Tensor, bits: int) -> Tensor:
    """Returns the integers that `packed` wrote, (..., W), int8; arguments as its result."""
    bytes_8 = pad(found.unflatten(-1, (-1, bits)), (0, EIGHT - bits))
    words = bytes_8.contiguous().view(torch.int64).flatten(-2)
    for lane, held in reversed(_lanes(bits)):
        upper = words << (lane - held) & _in_all(((1 << held) - 1) << lane, 2 * lane)
        words = words.bitwise_and_(_in_all((1 << held) - 1, 2 * lane)).bitwise_or_(upper)
    half = 1 << (bits - 1)
    words ^= _in_all(half, EIGHT)
    return words.view(torch.int8).sub_(half)


def _lanes(bits: int) -> list[tuple[int, int]]:
    """Returns, for each joining of pairs of lanes, a lane's width and its used bits."""
    return [(EIGHT << k, bits << k) for k in range(3)]


@cache
def _in_all(value: int, lane: int) -> int:
    """Returns a 64-bit word with the value in all of its lanes, as a signed integer."""
    word = sum(value << start for start in range(0, 64, lane))
    return word - (word >> 63 << 64)
