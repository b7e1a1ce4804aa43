"""Weights cut into chunks, and the largest entries of each, as DeMo and SparseLoCo send them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import pi
from typing import NamedTuple

import torch
from torch import Tensor


class Entries(NamedTuple):
    """Entries of chunks that are sent.

    Attributes:
        places_CK: Index of each within its chunk, from 0, int64, (chunks, entries).
        values_CK: Value of each, (chunks, entries).
    """

    places_CK: Tensor
    values_CK: Tensor


@dataclass(frozen=True)
class Chunks:
    """Division of a weight into chunks.

    A matrix is cut into chunks of O' rows and I' columns, the largest divisors of its sides that
    are not above `side`. A vector is one row, and a kernel of a convolution has a row per output.

    Attributes:
        shape: Shape of the weight.
        side: Largest length of a side of a chunk.
        entries: Number of entries of a chunk that are kept; all if it has fewer.
    """

    shape: torch.Size
    side: int
    entries: int

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the weight: (O, I)."""
        numel = self.shape.numel()
        rows = self.shape[0] if len(self.shape) > 1 else 1
        return rows, numel // rows

    @property
    def chunk(self) -> tuple[int, int]:
        """Rows and columns of a chunk: (O', I')."""
        rows, columns = self.matrix
        return _divisor(rows, self.side), _divisor(columns, self.side)

    @property
    def numel(self) -> int:
        """Number of entries in a chunk."""
        return self.chunk[0] * self.chunk[1]

    @property
    def number(self) -> int:
        """C, number of chunks."""
        return self.shape.numel() // self.numel

    @property
    def kept(self) -> int:
        """K, number of entries of a chunk that are kept."""
        return min(self.entries, self.numel)

    def cut(self, weight: Tensor) -> Tensor:
        """Returns the chunks of a weight, (C, O', I')."""
        (rows, columns), (o, i) = self.matrix, self.chunk
        return weight.reshape(rows // o, o, columns // i, i).transpose(1, 2).reshape(-1, o, i)

    def joined(self, chunks: Tensor) -> Tensor:
        """Returns the weight of chunks (C, O', I')."""
        (rows, columns), (o, i) = self.matrix, self.chunk
        blocks = chunks.reshape(rows // o, columns // i, o, i).transpose(1, 2)
        return blocks.reshape(self.shape)

    def cosines(self, chunks: Tensor) -> Tensor:
        """Returns the two-dimensional discrete cosine transform of each chunk."""
        o, i = (cosine_matrix(n, chunks.dtype) for n in self.chunk)
        return o @ chunks @ i.T

    def from_cosines(self, chunks: Tensor) -> Tensor:
        """Inverts `cosines`."""
        o, i = (cosine_matrix(n, chunks.dtype) for n in self.chunk)
        return o.T @ chunks @ i

    def largest(self, chunks: Tensor) -> Entries:
        """Returns the entries of largest magnitude of each chunk."""
        flat = chunks.flatten(1)
        places_CK = flat.abs().topk(self.kept, dim=1).indices
        return Entries(places_CK, flat.gather(1, places_CK))

    def filled(self, entries: Entries) -> Tensor:
        """Returns chunks of these entries, and zeros elsewhere: (C, O', I')."""
        zeros = entries.values_CK.new_zeros(self.number, self.numel)
        return zeros.scatter_(1, *entries).view(-1, *self.chunk)


@lru_cache(maxsize=64)
def cosine_matrix(n: int, dtype: torch.dtype) -> Tensor:
    """Returns the orthonormal DCT-II of vectors of length n: rows are cosines, (n, n)."""
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    cosines = (2 / n) ** 0.5 * torch.cos(pi * (2 * i + 1) * k / (2 * n))
    cosines[0] /= 2**0.5
    return cosines.to(dtype)


def _divisor(length: int, most: int) -> int:
    """Returns the largest divisor that is not above `most`."""
    return next(d for d in range(min(length, most), 0, -1) if length % d == 0)
