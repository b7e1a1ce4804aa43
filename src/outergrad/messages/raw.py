"""Tensors as bytes, and bytes as tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_CHUNK_BYTES = 1 << 26


def raw(t: Tensor) -> Tensor:
    """The bytes of a tensor's elements, in their order."""
    return t.detach().contiguous().view(-1).view(torch.uint8)


def from_raw(part: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """A tensor of such bytes."""
    return part.clone().view(dtype).view(shape)  # a copy is aligned for any dtype


def as_tensor(content: bytes) -> Tensor:
    """Bytes in memory of their own."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def digest(content: bytes, tensors: Iterable[Tensor] = ()) -> int:
    """62 bits of the SHA-256 of all bytes, so that it is an int64."""
    found = hashlib.sha256(content)
    for t in tensors:
        found.update(raw(t).cpu().numpy().data)
    return int.from_bytes(found.digest()[:8], "big") >> 2


def in_chunks(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors in groups of bounded size, one message each."""
    chunks: list[list[Tensor]] = []
    left = 0
    for t in tensors:
        if left <= 0:
            chunks.append([])
            left = _CHUNK_BYTES
        chunks[-1].append(t)
        left -= t.nbytes
    return chunks
