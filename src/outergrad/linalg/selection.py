"""Selection of the entries to send: the largest, random ones, or the largest blocks.

All functions return sorted indices ("places"), int64, on the gradient's device, deterministically.
Where magnitudes are equal, the first entries count as larger. NaN counts as the largest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outergrad.linalg.sidco import tail

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_SMALL = 1 << 18
"""Number of entries up to which `top_k` is faster than a threshold (`benchmarks/selection.py`)."""

_ROUNDS = 8
_MULTIPLIERS = (0x9E3779B97F4A7C15 - (1 << 64), 0xD6E8FEB86659FD93 - (1 << 64))
"""Odd numbers without a pattern in their bits."""


def top_k(flat: Tensor, k: int) -> Tensor:
    """Returns the places of the k entries of largest magnitude.

    Args:
        flat: (n,), any floating dtype.
        k: from 1 to n.

    Raises:
        ValueError: k is out of its range, or the gradient is not flat.
    """
    _check_flat(flat, k)
    return _largest(_order(flat), k)


def above(flat: Tensor, k: int) -> Tensor:
    """Returns the same places as `top_k`, faster where there are many entries and k is small.

    SIDCo estimates a threshold for somewhat more entries (`outergrad.linalg.sidco`), and the
    k largest are picked among those above it. Where these are too few, the threshold is lowered
    twice. After that, and for small gradients, all entries are searched.
    """
    _check_flat(flat, k)
    found = tail(flat, k) if len(flat) > _SMALL else None
    if found is None:
        return top_k(flat, k)
    return found.indices_C[_largest(_order(found.magnitudes_C), k)]


def random_k(n: int, k: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Returns the places of k of n entries, drawn without replacement.

    They depend on the numbers alone, not on the device, the versions of libraries or random
    streams, so that sites that share the seed draw the same places. The cost is O(k): a permutation
    chosen by the seed is applied to the numbers below k. It is a Feistel network of 8 rounds on
    pairs of half as many bits. It is applied again to results of n or above until they are below
    (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
        n: at least 1, below 2⁶².
        k: from 1 to n.
        seed: any integer.
        device: of the places.

    Raises:
        ValueError: k or n is out of its range.
    """
    _check(n, k)
    keys = _keys(seed)
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    places_K = _permuted(torch.arange(k, device=device), half, keys)
    while len(outside := (places_K >= n).nonzero().view(-1)):
        places_K[outside] = _permuted(places_K[outside], half, keys)
    return places_K.sort().values


def top_blocks(flat: Tensor, k: int, block: int) -> Tensor:
    """Returns the places of all entries of the blocks of largest Euclidean norm.

    A block is a run of consecutive entries; the last one may be short. The number of chosen blocks
    and of their entries follows from the lengths alone: see `blocks_of`.

    Args:
        flat: (n,), any floating dtype.
        k: approximate number of entries, from 1 to n.
        block: entries of a block, at least 1.

    Raises:
        ValueError: an argument is out of its range.
    """
    return entries_of(leading_blocks(flat, k, block), len(flat), block)


def blocks_of(n: int, k: int, block: int) -> tuple[int, int]:
    """Returns how many blocks `top_blocks` chooses, and how many entries these have.

    `k / block` blocks, rounded half up, at least one and at most all `ceil(n / block)`. B blocks
    have `min(n, B * block)` entries, even if the short last one is among them: its missing entries
    are then taken from the beginning of the first block that was not chosen.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check(n, k)
    if block < 1:
        raise ValueError(f"block={block!r}; use at least 1 entry")
    blocks = min(max(1, (2 * k + block) // (2 * block)), -(-n // block))
    return blocks, min(n, blocks * block)


def leading_blocks(flat: Tensor, k: int, block: int) -> Tensor:
    """Returns the sorted numbers of the blocks that `top_blocks` chooses; arguments as there."""
    _check_flat(flat, k)
    n = len(flat)
    blocks, _ = blocks_of(n, k, block)
    whole = n // block * block
    parts = [flat[:whole].view(-1, block), flat[whole:].view(1, -1)]
    parts = [part for part in parts if part.numel()]
    norms = _norms(parts)
    return _largest(_order(torch.cat(norms)), blocks)


def entries_of(blocks_B: Tensor, n: int, block: int) -> Tensor:
    """Returns the sorted places of the entries of chosen blocks, completed as in `blocks_of`.

    Args:
        blocks_B: numbers of blocks, sorted and distinct, below `ceil(n / block)`.
        n: entries of the gradient.
        block: entries of a block.
    """
    inside = torch.arange(block, device=blocks_B.device)
    places_K = (blocks_B[:, None] * block + inside).view(-1)
    if len(places_K) >= n:
        return places_K[:n]
    lacking = places_K >= n
    added = _first_not_among(blocks_B) * block + lacking.cumsum(0) - 1
    return torch.where(lacking, added, places_K).sort().values


def _first_not_among(blocks_B: Tensor) -> Tensor:
    return (blocks_B == torch.arange(len(blocks_B), device=blocks_B.device)).sum()


def _check(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k={k!r} of {n} entries; use a number from 1 to {n}")


def _check_flat(flat: Tensor, k: int) -> None:
    if flat.dim() != 1 or not flat.is_floating_point():
        raise ValueError(
            f"entries of {flat.dtype} of shape {tuple(flat.shape)}; use gradient.flatten()"
        )
    _check(len(flat), k)


def _order(flat: Tensor) -> Tensor:
    """Integers in the order of the magnitudes: their bits; NaN's are larger than infinity's."""
    bits = flat.contiguous().view(_BITS[flat.element_size()])
    return bits & torch.iinfo(bits.dtype).max


def _norms(parts: Sequence[Tensor]) -> list[Tensor]:
    """Norms of the rows in float64; float64 rows are scaled so that their squares stay in range."""
    if all(part.dtype != torch.float64 for part in parts):
        return [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in parts]
    peak = max((part.abs().amax().item() for part in parts if part.numel()), default=0.0)
    unit = peak if math.isfinite(peak) and peak and not 1e-100 < peak < 1e100 else 1.0
    return [torch.linalg.vector_norm(part / unit, dim=1, dtype=torch.float64) for part in parts]


def _largest(order_N: Tensor, k: int) -> Tensor:
    """Sorted places of the k largest of non-negative integers; of equal ones the first."""
    if k == len(order_N):
        return torch.arange(k, device=order_N.device)
    smallest = _kth_largest(order_N, k) if int(order_N.count_nonzero()) >= k else 0
    chosen_N = order_N > smallest
    missing = k - int(chosen_N.count_nonzero())
    chosen_N[_first(order_N == smallest, missing)] = True
    return chosen_N.nonzero().view(-1)


def _first(flags_N: Tensor, count: int) -> Tensor:
    """Places of the first `count` set flags; at least as many must be set."""
    looked_at = 2 * count
    while len(found := flags_N[:looked_at].nonzero().view(-1)) < count:
        looked_at *= 8
    return found[:count]


def _kth_largest(order_N: Tensor, k: int) -> int:
    """The k-th largest; on a CPU by NumPy in a tenth of the time, since it moves no indices."""
    if order_N.device.type == "cpu":
        place = len(order_N) - k
        return int(np.partition(order_N.numpy(), place)[place])
    return int(order_N.topk(k, sorted=False).values.min())


def _keys(seed: int) -> list[int]:
    digest = hashlib.sha256(str(int(seed)).encode()).digest()
    return [int.from_bytes(digest[4 * i : 4 * i + 4], "big") for i in range(_ROUNDS)]


def _permuted(x: Tensor, half: int, keys: list[int]) -> Tensor:
    """A permutation of the numbers below 2^(2 half)."""
    mask = (1 << half) - 1
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half) | right


def _mixed(x: Tensor) -> Tensor:
    """31 bits that depend on all bits of a number; products are modulo 2^64."""
    x = x * _MULTIPLIERS[0]
    x = (x ^ (x >> 32)) * _MULTIPLIERS[1]
    return (x >> 33) & 0x7FFFFFFF
