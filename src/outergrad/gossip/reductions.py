"""Reductions of a tensor to fewer bytes, of which `og.gossip.Choco` sends the differences."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outergrad.core.coding import Wire, stacked
from outergrad.linalg.orthonormal import orthonormal
from outergrad.linalg.selection import random_k
from outergrad.wire import Codec, Plain


class Reduction(Protocol):
    """A map of a tensor to a near one that takes fewer bytes; frozen.

    What is decoded must be nearer to the tensor than 0 is, on average: |Q(x) - x|² ≤ (1 - ω) |x|²
    with ω above 0.
    """

    def plain(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Plain]:
        """Returns the shapes and dtypes of the tensors that travel."""
        ...

    def encode(self, x: Tensor, seed: int) -> list[Tensor]:
        """Returns the tensors that travel.

        Args:
            x: what is to be told.
            seed: a number that the other end has, too, another one in each round.
        """
        ...

    def decode(self, sent: Sequence[Tensor], shape: tuple[int, ...], seed: int) -> Tensor:
        """Returns the near tensor."""
        ...


@dataclass(frozen=True)
class RandomK:
    """Sends the same random entries at both ends of an edge, so that no places travel.

    Attributes:
        fraction: Share of the entries of a tensor, in (0, 1]; at least one is sent. They are not
            divided by the share: what comes is a part, not an estimate.
    """

    fraction: float

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"RandomK: fraction={self.fraction!r}; use a number in (0, 1]")

    def plain(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Plain]:
        """Returns the values."""
        return [Plain((self._count(shape),), dtype)]

    def encode(self, x: Tensor, seed: int) -> list[Tensor]:
        """Returns the values at the places that the seed draws."""
        return [x.reshape(-1)[self._places(tuple(x.shape), seed, x.device)]]

    def decode(self, sent: Sequence[Tensor], shape: tuple[int, ...], seed: int) -> Tensor:
        """Returns the values at their places, and zeros elsewhere."""
        found = sent[0].new_zeros(torch.Size(shape).numel())
        found[self._places(shape, seed, found.device)] = sent[0]
        return found.view(shape)

    def _places(self, shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
        count = self._count(shape)
        if not count:
            return torch.empty(0, dtype=torch.int64, device=device)
        return random_k(torch.Size(shape).numel(), count, seed, device)

    def _count(self, shape: tuple[int, ...]) -> int:
        size = torch.Size(shape).numel()
        return min(size, max(1, round(self.fraction * size)))


@dataclass(frozen=True)
class LowRank:
    """Sends a matrix as two thin ones: its projection on a random subspace, after one iteration.

    Vectors, complex numbers and matrices of which two thin ones are no fewer numbers travel whole.

    Attributes:
        rank: Number of columns of the thin matrices.
    """

    rank: int = 1

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"LowRank: rank={self.rank!r}; use a whole number, 1 or more")

    def plain(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Plain]:
        """Returns the thin matrices (m, r) and (n, r)."""
        if not self._is_reduced(shape, dtype):
            return [Plain(shape, dtype)]
        m, n = shape[0], torch.Size(shape[1:]).numel()
        return [Plain((m, self.rank), wide(dtype)), Plain((n, self.rank), wide(dtype))]

    def encode(self, x: Tensor, seed: int) -> list[Tensor]:
        """Returns P with orthonormal columns, and xᵀ P: the tensor that comes is P Pᵀ x."""
        if not self._is_reduced(tuple(x.shape), x.dtype):
            return [x]
        x_MN = x.flatten(1).to(wide(x.dtype))
        p_MR = orthonormal((x_MN @ drawn(x_MN.shape[1], self.rank, seed, x_MN))[None])[0]
        return [p_MR, x_MN.mT @ p_MR]

    def decode(self, sent: Sequence[Tensor], shape: tuple[int, ...], seed: int) -> Tensor:
        """Returns the product of the thin matrices."""
        return sent[0] if len(sent) == 1 else (sent[0] @ sent[1].mT).view(shape)

    def _is_reduced(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        m, size = shape[0] if shape else 1, torch.Size(shape).numel()
        if dtype.is_complex:
            return False
        return len(shape) > 1 and 0 < (m + size // max(m, 1)) * self.rank < size


@dataclass(frozen=True)
class Coded:
    """Sends a tensor through codecs of `og.wire`, all its entries as one row.

    Attributes:
        codec: The codec, such as `og.wire.TopK(0.01)` or `og.wire.Sign()`.
    """

    codec: Codec

    def plain(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Plain]:
        """Returns the encoded tensors of one row."""
        return self.codec.tensors((1, torch.Size(shape).numel()), dtype)

    def encode(self, x: Tensor, seed: int) -> list[Tensor]:
        """Returns the encoded row."""
        written = self.codec.encode(x.reshape(1, -1))
        plain = self.plain(tuple(x.shape), x.dtype)
        return [t.to(one.dtype) for t, one in zip(written, plain, strict=True)]

    def decode(self, sent: Sequence[Tensor], shape: tuple[int, ...], seed: int) -> Tensor:
        """Returns the decoded row."""
        return self.codec.decode(sent, (1, torch.Size(shape).numel())).view(shape)


def reduction_of(given: Reduction | Wire, method: str) -> Reduction:
    """Returns a reduction, made of a codec of `og.wire` if it is one.

    Args:
        given: a reduction or a codec.
        method: name of the method whose setting it is.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(given, RandomK | LowRank | Coded):
        return given
    if not isinstance(given, type) and callable(getattr(given, "plain", None)):
        return given  # type: ignore[return-value]
    codecs = stacked(given, "reduce")  # type: ignore[arg-type]
    if len(codecs) != 1:
        raise ValueError(
            f"{method}: reduce={given!r}; use one codec, as og.wire.TopK(0.01) or og.wire.Sign(), "
            f"og.gossip.RandomK(...) or og.gossip.LowRank(...)"
        )
    return Coded(codecs[0])


def seed_of(*about: object) -> int:
    """Returns a seed that follows from some numbers and names, alike everywhere: below 2⁵⁶."""
    digest = hashlib.sha256(" ".join(map(str, about)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def drawn(rows: int, columns: int, seed: int, like: Tensor) -> Tensor:
    """Returns normally distributed numbers (rows, columns) that follow from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return found.to(like.device, like.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of factors and vectors: decompositions know float32 and float64 alone."""
    return torch.float64 if dtype == torch.float64 else torch.float32
