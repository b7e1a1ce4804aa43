"""Sums of the sites' tensors, in 64 bits and rank order: the same bits wherever they are made.

For process groups, minima, maxima, products and operations on bits as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outergrad.star.frames import MalformedError

BF16 = "bfloat16"
DTYPES = (
    *("float16", BF16, "float32", "float64"),
    *("uint8", "int8", "int16", "int32", "int64"),
)
"""The dtypes of sums; frames name one by its index here."""
_OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
OPERATIONS = tuple(_OPERATIONS)
_OF_DTYPES = 1 << 4
"""A number of a dtype with its operation counts operations in steps of this."""
_ON_BITS, _ON_FRACTIONS = frozenset({"and", "or", "xor"}), frozenset({"mean"})


def coded(dtype: str, operation: str = "sum") -> int:
    """Returns the number by which frames name a dtype with an operation.

    Raises:
        ValueError: there is no such dtype, or no such operation on it.
    """
    if operation in (_ON_BITS if "float" in dtype else _ON_FRACTIONS):
        raise ValueError(f"no operation {operation!r} on numbers of type {dtype}")
    return DTYPES.index(dtype) + _OF_DTYPES * OPERATIONS.index(operation)


def _decoded(code: int) -> tuple[str, str]:
    """Returns the dtype and the operation of a number that `coded` returned.

    Raises:
        MalformedError: it did not.
    """
    operation, dtype = divmod(code, _OF_DTYPES)
    try:
        names = DTYPES[dtype], OPERATIONS[operation]
        coded(*names)
    except (IndexError, ValueError):
        raise MalformedError(f"what cannot be added up: numbers of type {code}") from None
    return names


def called(code: int) -> str:
    """Returns a dtype with its operation in words, for people."""
    dtype, operation = _decoded(code)
    return dtype if operation == "sum" else f"{dtype} ({operation})"


def added(parts: Sequence[bytes | memoryview], code: int) -> bytes:
    """Returns the sum of equally many numbers of each site, rounded once.

    Args:
        parts: bytes of every site, in rank order.
        code: dtype, and the operation if it is not a sum (`coded`).

    Raises:
        MalformedError: the parts are not equally many numbers of this dtype.
    """
    name, operation = _decoded(code)
    try:
        numbers = [_read(part, name) for part in parts]
        total = _reduced(numbers, _OPERATIONS[operation])
        return _written(total / len(numbers) if operation == "mean" else total, name)
    except ValueError as error:
        raise MalformedError(f"what cannot be added up: {error}") from None


def refuse_if_none(nbytes: int, code: int) -> None:
    """Raises unless so many bytes can be numbers of a dtype.

    Args:
        nbytes: number of bytes.
        code: dtype, with its operation.

    Raises:
        MalformedError: there is no such dtype or operation, or the last number is not whole.
    """
    name, _ = _decoded(code)
    if nbytes % (2 if name == BF16 else np.dtype(name).itemsize):
        raise MalformedError(f"what cannot be added up: {nbytes} bytes of {name}")


def _reduced(numbers: Sequence[np.ndarray], call: Callable[..., np.ndarray]) -> np.ndarray:
    wide = np.float64 if numbers[0].dtype.kind == "f" else np.int64
    total = numbers[0].astype(wide)
    with np.errstate(over="ignore", invalid="ignore"):
        for other in numbers[1:]:
            if len(other) != len(total):  # numpy would add a single number to all
                raise ValueError(f"{len(other)} numbers beside {len(total)}")
            call(total, other, out=total)
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
