"""Floats as whole numbers of a unit, whose sum is exact in any order and modulo their width."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

HEADROOM = 3
"""Binary digits by which numbers may grow before they need another unit."""
_PART = 1 << 15
"""Numbers that are converted at a time: they stay in the processor's cache."""


@dataclass(frozen=True, kw_only=True)
class Carrier:
    """Integers that carry floats of a type. Units are powers of two, and go by their exponents.

    Attributes:
        dtype: of the integers.
        lowest: exponent of what counts as zero.
        highest: exponent of the largest float.
    """

    dtype: str
    lowest: int
    highest: int

    def digits(self, sites: int) -> int:
        """Returns the binary digits of one site's integers: those of all sites add up safely."""
        return 8 * np.dtype(self.dtype).itemsize - 1 - (sites - 1).bit_length()

    def unit(self, exponent: int, sites: int) -> int:
        """Returns the unit for numbers below 2^exponent, with headroom."""
        return exponent + HEADROOM - self.digits(sites)

    def fits(self, largest: float, unit: int, sites: int) -> bool:
        """True if a site may send numbers up to this in a unit; never if it is infinite or NaN."""
        whole = largest * 2.0**-unit
        return math.isfinite(whole) and round(whole) < 1 << self.digits(sites)

    def exponent(self, largest: float) -> int:
        """Returns the least e with largest < 2^e that this carrier tells apart."""
        exponent = math.frexp(largest)[1] if largest else self.lowest
        return min(max(exponent, self.lowest), self.highest)


_OF_32_BITS = Carrier(dtype="int32", lowest=-149, highest=128)
CARRIERS = {
    torch.float16: _OF_32_BITS,
    torch.bfloat16: _OF_32_BITS,
    torch.float32: _OF_32_BITS,
    torch.float64: Carrier(dtype="int64", lowest=-900, highest=1024),
}
"""The integers that carry floats: 16 bits would leave too few digits for what is small."""


def largest_of(numbers: np.ndarray) -> float:
    """Returns the largest absolute value; NaN if there is one."""
    low, high = torch.aminmax(torch.from_numpy(numbers))
    return max(-float(low), float(high))


def finite(numbers: np.ndarray) -> np.ndarray:
    """Returns floats with zeros in place of those that are not finite."""
    is_finite = np.isfinite(numbers)
    return numbers if is_finite.all() else np.where(is_finite, numbers, 0)


def in_units(numbers: np.ndarray, unit: int, into: np.ndarray) -> None:
    """Writes floats as the nearest whole numbers of units.

    What is not zero stays so: where a sum counts sites, it is read as "none" or "some".
    """
    for at in range(0, len(numbers), _PART):
        exact = numbers[at : at + _PART].astype(np.float64) * 2.0**-unit
        whole = np.rint(exact)
        np.copysign(1.0, exact, out=whole, where=(whole == 0) & (exact != 0))
        into[at : at + _PART] = whole


def in_floats(whole: np.ndarray, unit: int) -> np.ndarray:
    """Returns whole numbers of units as floats of 64 bits."""
    with np.errstate(over="ignore"):
        return whole * np.float64(2.0**unit)


_BITS = 21
_NAN, _PLUS, _MINUS = 0, _BITS, 2 * _BITS


def not_finite(numbers: np.ndarray) -> np.ndarray:
    """Returns where floats are NaN, inf and -inf, as integers that can be added up to counts."""
    found = np.isnan(numbers).astype(np.int64) << _NAN
    found += (numbers == np.inf).astype(np.int64) << _PLUS
    return found + ((numbers == -np.inf).astype(np.int64) << _MINUS)


def put_back(counts: np.ndarray, total: np.ndarray) -> None:
    """Writes what is not finite into a sum of the rest, by how many sites had it."""
    nan, plus, minus = ((counts >> at) & ((1 << _BITS) - 1) for at in (_NAN, _PLUS, _MINUS))
    total[plus > 0] = np.inf
    total[minus > 0] = -np.inf
    total[(nan > 0) | ((plus > 0) & (minus > 0))] = np.nan
