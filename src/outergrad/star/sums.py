"""Sums of the sites' tensors, in 64 bits and rank order: the same bits wherever they are made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outergrad.star.frames import MalformedError

BF16 = "bfloat16"
DTYPES = (
    *("float16", BF16, "float32", "float64"),
    *("uint8", "int8", "int16", "int32", "int64"),
)
"""The dtypes of sums; frames name one by its index here."""


def added(parts: Sequence[bytes | memoryview], dtype: int) -> bytes:
    """Returns the sum of equally many numbers of each site, rounded once.

    Args:
        parts: bytes of every site, in rank order.
        dtype: index in `DTYPES`.

    Raises:
        MalformedError: the parts are not equally many numbers of this dtype.
    """
    try:
        name = DTYPES[dtype]
        numbers = [_read(part, name) for part in parts]
        return _written(_sum(numbers), name)
    except (IndexError, ValueError) as error:
        raise MalformedError(f"what cannot be added up: {error}") from None


def refuse_if_none(nbytes: int, dtype: int) -> None:
    """Raises unless so many bytes can be numbers of a dtype.

    Args:
        nbytes: number of bytes.
        dtype: index in `DTYPES`.

    Raises:
        MalformedError: there is no such dtype, or the last number is not whole.
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
            if len(other) != len(total):  # numpy would add a single number to all
                raise ValueError(f"{len(other)} numbers beside {len(total)}")
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
