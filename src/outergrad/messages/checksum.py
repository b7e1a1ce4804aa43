"""Checksums of messages and tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import cache
from typing import SupportsInt

import torch
from torch import Tensor

_COLUMNS = 64
_RUNS = 64
_PRIME = (1 << 61) - 1


class Digest:
    """A number that is computed on first use, by any thread and at any place of a program.

    Python may collect a session anywhere, also while a compiler traces a model, and the session's
    farewell needs its digest. So where a mode that the thread is in refuses, it is computed outside
    of all modes, and again where a computation is interrupted by that.

    Args:
        compute: computes it; has no other effect.
    """

    def __init__(self, compute: Callable[[], SupportsInt]) -> None:
        self._compute: Callable[[], SupportsInt] | None = compute
        self._found, self._lock = 0, threading.RLock()

    def __int__(self) -> int:
        if self._compute is not None:
            with self._lock:  # another thread may have computed it in the meantime
                compute = self._compute
                if compute is None:
                    return self._found
                try:
                    self._found = int(compute())
                except Exception:  # a compiler's mode takes no tensors of others
                    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                        self._found = int(compute())
                self._compute = None
        return self._found


class SummedRoom:
    """A tensor stored as equal runs of words, padded with zeros: its checksum takes three calls.

    The words of each run are summed, modulo 2^64, and the sums with odd weights: a change of a
    single word is always seen, and so is an exchange of words of different runs. Runs are read
    one after another, which takes half as long as columns do where the tensor is in no cache.

    Args:
        like: gives the dtype and the device.
        size: number of elements.

    Attributes:
        tensor: 1-D, zeros at first.
    """

    def __init__(self, like: Tensor, size: int) -> None:
        length = -(-size * like.element_size() // (8 * _RUNS))
        self._words = torch.zeros(_RUNS, length, dtype=torch.int64, device=like.device)
        self._weights = _odd(_RUNS, like.device)
        self.tensor = self._words.view(-1).view(like.dtype)[:size]

    def checksum(self) -> Digest:
        """Checksum of the current bytes: sums the runs now, combines them on first use."""
        sums, weights = self._words.sum(dim=1), self._weights
        return Digest(lambda: sums.dot(weights))


def checksum(t: Tensor) -> Tensor:
    """Checksum of the bytes of a contiguous tensor, as an int64 scalar on its device.

    Words are summed in columns, modulo 2^64, and the sums with odd weights: a change of a single
    word is always seen, and so is an exchange of words of different columns. It costs one pass.
    """
    flat = t.view(-1).view(torch.uint8)
    flat = flat if flat.storage_offset() % 8 == 0 else flat.clone()  # int64 views need alignment
    size = len(flat) // 8 * 8
    words, tail = flat[:size].view(torch.int64), flat[size:]
    whole = size // 8 // _COLUMNS * _COLUMNS
    parts = [words[:whole].view(-1, _COLUMNS).sum(dim=0), words[whole:]]
    parts = torch.cat([*parts, tail.to(torch.int64)] if len(tail) else parts)
    return (parts * _odd(len(parts), t.device)).sum()


@cache
def _odd(count: int, device: torch.device) -> Tensor:
    """The first odd numbers, cached; only about as many lengths as columns occur."""
    return torch.arange(1, 2 * count, 2, device=device)


def combined(checksums: Iterable[SupportsInt]) -> int:
    """Combines checksums to one that fits into an int64; it changes if any bit of one changes."""
    found = 0
    for one in checksums:
        found = (31 * found + int(one)) % _PRIME
    return found


def sum_of_bits(t: Tensor) -> int:
    """Sum of the elements' bits, of any strides; differs, but for chance, if any element does."""
    own = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(own.view(words[own.element_size()]).sum())
