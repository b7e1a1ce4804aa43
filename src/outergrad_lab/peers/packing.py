"""Entries of chunks as bytes: indices in as few bits as a chunk needs, values in 32, 8 or 2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import pi
from typing import NamedTuple, Protocol

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


LARGEST = 127
"""Largest magnitude in an int8, the same above and below zero."""


class Values(Protocol):
    """Encoding of the values of one weight."""

    def nbytes(self, count: int, dtype: torch.dtype) -> int:
        """Returns the bytes of `count` values."""
        ...

    def write(self, values_N: Tensor) -> Tensor:
        """Encodes values as bytes, uint8."""
        ...

    def read(self, content: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Decodes values, as exactly as the encoding allows: (N,)."""
        ...


class Floats:
    """Values without any rounding."""

    def nbytes(self, count: int, dtype: torch.dtype) -> int:
        """Returns 4 bytes per value in float32."""
        return count * dtype.itemsize

    def write(self, values_N: Tensor) -> Tensor:
        """Encodes values as bytes, uint8."""
        return values_N.contiguous().view(torch.uint8)

    def read(self, content: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Decodes the exact values."""
        return content.clone().view(dtype)


class Int8:
    """Whole multiples of one 127th of the weight's largest magnitude, which is sent as float32."""

    def nbytes(self, count: int, dtype: torch.dtype) -> int:
        """Returns 1 byte per value, and 4."""
        return count + 4

    def write(self, values_N: Tensor) -> Tensor:
        """Encodes values as bytes, uint8."""
        step = (values_N.abs().amax() / LARGEST).float()
        least = torch.finfo(torch.float32).tiny
        whole = (values_N / step.clamp_min(least)).round().clamp(-LARGEST, LARGEST)
        return torch.cat([step.view(1).view(torch.uint8), whole.to(torch.int8).view(torch.uint8)])

    def read(self, content: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Decodes values, within half a step of the exact ones."""
        step = content[:4].clone().view(torch.float32)
        return content[4:].view(torch.int8).to(dtype) * step.to(dtype)


class TwoBits:
    """Sign of each value, and whether its magnitude is above the weight's mean magnitude.

    Values are decoded as the mean magnitude of their half, two float32 per weight.
    """

    def nbytes(self, count: int, dtype: torch.dtype) -> int:
        """Returns a quarter of a byte per value, and 8."""
        return -(-count // 4) + 8

    def write(self, values_N: Tensor) -> Tensor:
        """Encodes values as bytes, uint8."""
        size_N = values_N.abs()
        large_N = size_N > size_N.mean()
        levels = torch.stack([_mean(size_N[~large_N]), _mean(size_N[large_N])]).float()
        codes_N = (values_N < 0).long() + 2 * large_N.long()
        return torch.cat([levels.view(torch.uint8), packed_bits(codes_N, 2)])

    def read(self, content: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Decodes to four different numbers."""
        levels = content[:8].clone().view(torch.float32).to(dtype)
        codes_N = unpacked_bits(content[8:], 2, count)
        return levels[codes_N // 2] * (1 - 2 * (codes_N % 2)).to(dtype)


VALUES: dict[int, Values] = {32: Floats(), 8: Int8(), 2: TwoBits()}
"""Encodings by the bits of a value; 32 stands for no rounding, and is 64 in float64."""


class Message:
    """Entries of all weights in one message.

    Args:
        weights: Tensors of their shapes and dtypes.
        side: Largest length of a side of a chunk.
        entries: Number of entries of a chunk that are kept.
        bits: Bits of a value, a key of `VALUES`.

    Attributes:
        chunks: Division of each weight into chunks.
    """

    def __init__(self, weights: Iterable[Tensor], side: int, entries: int, bits: int) -> None:
        self._weights = [(Chunks(w.shape, side, entries), w.dtype) for w in weights]
        self.chunks = [chunks for chunks, _ in self._weights]
        self._values = VALUES[bits]

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return sum(sum(self._sizes(*weight)) for weight in self._weights)

    def written(self, entries: Sequence[Entries]) -> Tensor:
        """Encodes entries as bytes, uint8."""
        written = [
            part
            for (chunks, _), own in zip(self._weights, entries, strict=True)
            for part in (
                packed_bits(own.places_CK.reshape(-1), _place_bits(chunks)),
                self._values.write(own.values_CK.reshape(-1)),
            )
        ]
        return torch.cat(written)

    def read(self, content: Tensor) -> list[Entries]:
        """Decodes the entries of every weight, with values as exact as their bits allow."""
        sizes = [size for weight in self._weights for size in self._sizes(*weight)]
        parts = iter(content.split(sizes))
        return [self._entries(*weight, next(parts), next(parts)) for weight in self._weights]

    def mean(self, contents: Sequence[Tensor]) -> list[Tensor]:
        """Returns the mean of the sites' entries as chunks of each weight; missing ones are 0."""
        by_weight = zip(*map(self.read, contents), strict=True)
        found = zip(self.chunks, by_weight, strict=True)
        return [mean_of(chunks, sites) for chunks, sites in found]

    def _entries(
        self, chunks: Chunks, dtype: torch.dtype, places: Tensor, values: Tensor
    ) -> Entries:
        shape = chunks.number, chunks.kept
        count = shape[0] * shape[1]
        places_CK = unpacked_bits(places, _place_bits(chunks), count).view(shape)
        return Entries(places_CK, self._values.read(values, count, dtype).view(shape))

    def _sizes(self, chunks: Chunks, dtype: torch.dtype) -> tuple[int, int]:
        """Returns the bytes of the indices and of the values of one weight."""
        count = chunks.number * chunks.kept
        return -(-count * _place_bits(chunks) // 8), self._values.nbytes(count, dtype)


def mean_of(chunks: Chunks, sites: Sequence[Entries]) -> Tensor:
    """Returns the mean of the sites' entries of one weight as chunks, (C, O', I')."""
    return torch.stack([chunks.filled(entries) for entries in sites]).mean(0)


def _place_bits(chunks: Chunks) -> int:
    """Returns the bits of an index: 12 for a chunk of 64 x 64."""
    return max((chunks.numel - 1).bit_length(), 1)


def packed_bits(codes_N: Tensor, bits: int) -> Tensor:
    """Packs whole numbers from 0 to 2^bits - 1 into bytes, uint8."""
    shifts = torch.arange(bits, device=codes_N.device)
    flags = ((codes_N[:, None] >> shifts) & 1).reshape(-1)
    flags = torch.nn.functional.pad(flags, (0, -len(flags) % 8)).view(-1, 8)
    return (flags << torch.arange(8, device=flags.device)).sum(1).to(torch.uint8)


def unpacked_bits(content: Tensor, bits: int, count: int) -> Tensor:
    """Inverts `packed_bits`: int64, (count,)."""
    flags = (content[:, None].long() >> torch.arange(8, device=content.device)) & 1
    flags = flags.reshape(-1)[: count * bits].view(count, bits)
    return (flags << torch.arange(bits, device=content.device)).sum(1)


def _mean(sizes: Tensor) -> Tensor:
    """Returns the mean; 0 if there are no sizes."""
    return sizes.sum() / max(len(sizes), 1)
