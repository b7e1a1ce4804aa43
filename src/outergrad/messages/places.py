"""Compact encoding of k of n indices ("places"), whose length follows from n and k alone.

A place is split into its b lowest bits and the rest, the number of a chunk of 2^b entries. The
lowest bits are written unchanged. The number of places in each chunk is written in unary, all
chunks together: a one per place and a zero per step to the next chunk (Elias, 1974; Fano, 1971).
That is `k (b + 1) + n / 2^b` bits. At a density of 1% it is 8.6 bits per place, where 8.1 is the
least possible; 12 bits and a count per chunk of 4096 would be 12.3. It is never more than 0.8 bits
per place above the least, but for a few bytes, at densities up to a quarter. Where a bitmap of all
entries is shorter, it is written instead. If all entries or none are selected, nothing is written.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_BITMAP = -1


def nbytes(n: int, k: int) -> int:
    """Number of bytes that the places of k of n entries take.

    Raises:
        ValueError: not 0 <= k <= n.
    """
    return _size(n, k, _low_bits(n, k))


def packed(indices_K: Tensor, n: int) -> Tensor:
    """Encodes places as bytes, uint8, on their device.

    Args:
        indices_K: distinct, sorted, below n, int64.
        n: number of entries.

    Raises:
        ValueError: the places are not distinct, sorted and below n.
    """
    k = len(indices_K)
    b = _low_bits(n, k)
    if (wrong := _objection(indices_K, n)) is not None:
        raise ValueError(f"places {wrong}; use sorted, distinct ones below {n}")
    if k in (0, n):
        return torch.empty(0, dtype=torch.uint8, device=indices_K.device)
    if b == _BITMAP:
        return _packed_bits(_flags(indices_K, n))
    high_K = (indices_K >> b) + torch.arange(k, device=indices_K.device)
    return torch.cat([_packed_bits(_flags(high_K, _unary(n, k, b))), _packed_low(indices_K, b)])


def unpacked(content: Tensor, n: int, k: int) -> Tensor:
    """Decodes the places that `packed` wrote, int64, (k,): distinct, sorted and below n.

    Args:
        content: bytes, which may be damaged.
        n: number of entries.
        k: number of places.

    Raises:
        ValueError: these are not the bytes of k places below n.
    """
    expected = nbytes(n, k)
    if content.dtype != torch.uint8 or content.shape != (expected,):
        raise ValueError(
            f"places: {content.dtype} of shape {tuple(content.shape)}, not {expected} bytes"
        )
    if k in (0, n):
        return torch.arange(k, device=content.device)
    b = _low_bits(n, k)
    if b == _BITMAP:
        return _ones(content, n, k)
    unary = _unary(n, k, b)
    middle = _bytes(unary)
    high_K = _ones(content[:middle], unary, k) - torch.arange(k, device=content.device)
    indices_K = (high_K << b) | _unpacked_low(content[middle:], k, b)
    if (wrong := _objection(indices_K, n)) is not None:
        raise ValueError(f"places {wrong}, of {k} below {n}")
    return indices_K


@lru_cache(maxsize=4096)
def _low_bits(n: int, k: int) -> int:
    """The b with the fewest bytes, or _BITMAP; the smaller of equals."""
    if not 0 <= k <= n:
        raise ValueError(f"{k} places of {n} entries; use a number from 0 to {n}")
    return min(range(_BITMAP, n.bit_length() + 1), key=lambda b: _size(n, k, b))


def _size(n: int, k: int, b: int) -> int:
    if k in (0, n):
        return 0
    if b == _BITMAP:
        return _bytes(n)
    return _bytes(_unary(n, k, b)) + b // 8 * k + b % 8 * _bytes(k)


def _unary(n: int, k: int, b: int) -> int:
    """Bits of the unary part: a one per place, a zero per step from the first chunk to the last."""
    return ((n - 1) >> b) + k


def _bytes(bits: int) -> int:
    return -(-bits // 8)


def _objection(indices_K: Tensor, n: int) -> str | None:
    """Describes why places are not distinct, sorted and below n; None if they are."""
    if not len(indices_K):
        return None
    in_order = (indices_K[1:] > indices_K[:-1]).all()
    first, last, in_order = torch.stack([indices_K[0], indices_K[-1], in_order]).tolist()
    if not in_order:
        return "are not in order"
    return f"from {first} to {last}" if first < 0 or last >= n else None


def _flags(places: Tensor, count: int) -> Tensor:
    flags = torch.zeros(count, dtype=torch.uint8, device=places.device)
    flags[places] = 1
    return flags


def _ones(content: Tensor, bits: int, k: int) -> Tensor:
    """Places of the ones among the first `bits` bits.

    Raises:
        ValueError: their number is not k.
    """
    ones = _unpacked_bits(content, bits).nonzero().view(-1)
    if len(ones) != k:
        raise ValueError(f"places of {len(ones)} entries, not of {k}")
    return ones


def _packed_low(indices_K: Tensor, b: int) -> Tensor:
    """The lowest b bits: whole bytes first, then the other bits, each for all places in turn."""
    whole = [(indices_K >> s).to(torch.uint8) for s in range(0, b // 8 * 8, 8)]
    rest = [_packed_bits((indices_K >> s).to(torch.uint8) & 1) for s in range(b // 8 * 8, b)]
    return torch.cat([*whole, *rest, indices_K.new_empty(0, dtype=torch.uint8)])


def _unpacked_low(content: Tensor, k: int, b: int) -> Tensor:
    whole, rest = b // 8, b % 8
    low_K = torch.zeros(k, dtype=torch.int64, device=content.device)
    for i, part in enumerate(content[: whole * k].view(whole, k)):
        low_K |= part.long() << 8 * i
    for i, part in enumerate(content[whole * k :].view(rest, _bytes(k))):
        low_K |= _unpacked_bits(part, k).long() << (8 * whole + i)
    return low_K


def _packed_bits(flags: Tensor) -> Tensor:
    """Packs zeros and ones, uint8, into bytes, the first in the lowest bit."""
    padded = torch.nn.functional.pad(flags, (0, -len(flags) % 8)).view(-1, 8)
    found = padded[:, 0].clone()
    for i in range(1, 8):
        found |= padded[:, i] << i
    return found


def _unpacked_bits(content: Tensor, count: int) -> Tensor:
    flags = torch.empty(len(content), 8, dtype=torch.uint8, device=content.device)
    for i in range(8):
        flags[:, i] = (content >> i) & 1
    return flags.view(-1)[:count]
