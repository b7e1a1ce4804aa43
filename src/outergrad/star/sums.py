"""Sums of what sites sent, in float64 and in the order of sites: the same bits wherever."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outergrad.star.frames import MalformedError

BF16 = "bfloat16"
DTYPES = (
    *("float16", BF16, "float32", "float64"),
    *("uint8", "int8", "int16", "int32", "int64"),
)
"""By their places here frames name them."""


def added(parts: Sequence[bytes | memoryview], dtype: int) -> bytes:
    """The sum of as many numbers of each site, rounded once.

    Args:
        parts: of every site, in their order.
        dtype: place in `DTYPES`.

    Raises:
        MalformedError: they are not numbers of this type, as many of each.
    """
    try:
        name = DTYPES[dtype]
        numbers = [_read(part, name) for part in parts]
        return _written(_sum(numbers), name)
    except (IndexError, ValueError) as error:
        raise MalformedError(f"what cannot be added up: {error}") from None


def refuse_if_none(nbytes: int, dtype: int) -> None:
    """Refuses bytes that are no numbers.

    Args:
        nbytes: how many there are.
        dtype: place in `DTYPES`.

    Raises:
        MalformedError: it is none, or the last number is not whole.
    """
    if dtype >= len(DTYPES):
        raise MalformedError(f"what cannot be added up: numbers of type {dtype}")
    if nbytes % (2 if DTYPES[dtype] == BF16 else np.dtype(DTYPES[dtype]).itemsize):
        raise MalformedError(f"what cannot be added up: {nbytes} bytes of {DTYPES[dtype]}")


def _sum(numbers: Sequence[np.ndarray]) -> np.ndarray:
    wide = np.float64 if numbers[0].dtype.kind == "f" else np.int64
    total = numbers[0].astype(wide)
    with np.errstate(over="ignore", invalid="ignore"):
        for other in numbers[1:]:
            total += other
    return total


def _read(part: bytes | memoryview, name: str) -> np.ndarray:
    if name != BF16:
        return np.frombuffer(part, np.dtype(name).newbyteorder("<"))
    halves = np.frombuffer(part, "<u2").astype(np.uint32)
    return (halves << 16).view(np.float32)


def _written(total: np.ndarray, name: str) -> bytes:
    with np.errstate(over="ignore", invalid="ignore"):
        if name != BF16:
            return total.astype(np.dtype(name).newbyteorder("<")).tobytes()
        bits = total.astype(np.float32).view(np.uint32)
    to_even = bits + (0x7FFF + ((bits >> 16) & 1))
    quiet = np.where(np.isnan(total), (bits >> 16) | 0x40, to_even >> 16)  # rounding spoils a NaN
    return quiet.astype("<u2").tobytes()
