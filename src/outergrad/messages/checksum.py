"""A number that changes with what is in a message."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_COLUMNS = 64
_PRIME = (1 << 61) - 1


def checksum(t: Tensor) -> Tensor:
    """Of all bytes of a contiguous tensor, as an int64 scalar on its device.

    Words are summed in columns, modulo 2^64, and the sums with odd weights: a change of a single
    word is always seen, and so is an exchange of words of different columns. It costs one pass.
    """
    flat = t.view(-1).view(torch.uint8)
    flat = flat if flat.storage_offset() % 8 == 0 else flat.clone()
    size = len(flat) // 8 * 8
    words, tail = flat[:size].view(torch.int64), flat[size:].to(torch.int64)
    whole = len(words) // _COLUMNS * _COLUMNS
    sums = words[:whole].view(-1, _COLUMNS).sum(dim=0)
    parts = torch.cat([sums, words[whole:], tail])
    return (parts * torch.arange(1, 2 * len(parts), 2, device=t.device)).sum()


def combined(checksums: Iterable[int]) -> int:
    """One number of several, which fits into an int64; a change of any bit of one is seen in it."""
    found = 0
    for one in checksums:
        found = (31 * found + one) % _PRIME
    return found
