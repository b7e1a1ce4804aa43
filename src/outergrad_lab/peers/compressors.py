"""Compressors of a site's matrices into one message, of a length that all sites know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from outergrad_lab.peers.packing import Message


class Compressor(Protocol):
    """Compressor of named matrices, whose kernels have a row per output."""

    def written(self, matrices: Mapping[str, Tensor], seed: int) -> Tensor:
        """Encodes about these matrices; what is random follows from the seed."""
        ...

    def read(self, content: Tensor) -> dict[str, Tensor]:
        """Decodes what is left of the matrices."""
        ...


class LargestEntries:
    """The entries of largest magnitude of each chunk.

    Args:
        matrices: Tensors of their shapes and dtypes.
        side: Largest length of a side of a chunk.
        entries: Number of entries of a chunk that are kept.
        bits: Bits of a value, a key of `packing.VALUES`.
    """

    def __init__(self, matrices: Mapping[str, Tensor], side: int, entries: int, bits: int) -> None:
        self._message = Message(matrices.values(), side, entries, bits)
        self._chunks = dict(zip(matrices, self._message.chunks, strict=True))

    def written(self, matrices: Mapping[str, Tensor], seed: int) -> Tensor:
        """Encodes places and values as bytes, uint8."""
        cut = ((chunks, chunks.cut(matrices[name])) for name, chunks in self._chunks.items())
        return self._message.written([chunks.largest(x) for chunks, x in cut])

    def read(self, content: Tensor) -> dict[str, Tensor]:
        """Decodes the entries, with zeros elsewhere."""
        each = zip(self._chunks.items(), self._message.read(content), strict=True)
        return {name: chunks.joined(chunks.filled(found)) for (name, chunks), found in each}


class LowRank:
    """Projections P Pᵀ D of matrices D (O, I) on about their first singular vectors.

    Args:
        matrices: Tensors of their shapes.
        rank: R; smaller matrices have as many as they can.
    """

    def __init__(self, matrices: Mapping[str, Tensor], rank: int) -> None:
        self._shapes = {name: x.shape for name, x in matrices.items()}
        sides = {name: x.flatten(1).shape for name, x in matrices.items()}
        self._ranks = {name: min(rank, *both) for name, both in sides.items()}
        self._sizes = [side * self._ranks[name] for name, both in sides.items() for side in both]

    def written(self, matrices: Mapping[str, Tensor], seed: int) -> Tensor:
        """Returns P (O, R) and Dᵀ P (I, R) of all matrices, as they are."""
        generator = torch.Generator().manual_seed(seed)
        each = (leading(matrices[n].flatten(1), r, generator) for n, r in self._ranks.items())
        return torch.cat([factor.reshape(-1) for both in each for factor in both])

    def read(self, content: Tensor) -> dict[str, Tensor]:
        """Returns the products of the factors."""
        parts = iter(content.split(self._sizes))
        pairs = (
            (n, next(parts).view(-1, r), next(parts).view(-1, r).T) for n, r in self._ranks.items()
        )
        return {name: (left @ right).view(self._shapes[name]) for name, left, right in pairs}


def leading(matrix: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns about the first left singular vectors P of a matrix D, and Dᵀ P.

    Two steps of a power iteration from random vectors: P is orthonormal, and P Pᵀ D a projection,
    however close P is.
    """
    right = torch.randn(matrix.shape[1], rank, generator=generator).to(matrix)
    left = torch.linalg.qr(matrix @ right).Q
    left = torch.linalg.qr(matrix @ (matrix.T @ left)).Q
    return left, matrix.T @ left
