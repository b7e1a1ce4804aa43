"""PowerGossip: power iterations on the difference of two neighbours' weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outergrad.gossip.content import bytes_of, nbytes_of, plain_of, tensors_of
from outergrad.gossip.ends import End, GossipMethod, Memory, Weights, require_gamma
from outergrad.gossip.reductions import drawn, seed_of, wide
from outergrad.linalg.orthonormal import orthonormal
from outergrad.methods.common import require
from outergrad.wire import Plain


@dataclass(frozen=True, kw_only=True)
class PowerGossip(GossipMethod):
    """Neighbours send products of their weights with a few vectors, which both know.

    Choose it for weights that are matrices, where a message of all weights is too long: it needs
    no tuning. A message has r (m + n) / 2 numbers per m × n matrix on average. Biases, norms,
    other vectors and complex numbers travel whole.

    With X the weights of each site, D the difference of theirs: in odd rounds both send X q̂, with
    q̂ = orth(q), p := D q̂, and D is taken for p q̂ᵀ. In even rounds both send Xᵀ p̂, q := Dᵀ p̂, and
    D is taken for p̂ qᵀ. The vectors of one round begin the next, so that they turn to the largest
    differences. Source: Vogels, Karimireddy and Jaggi, "PowerGossip: Practical Low-Rank
    Communication Compression in Decentralized Deep Learning", arXiv 2008.01425.

    Attributes:
        rank: r, columns of p and q.
        gamma: Step, above 0; 1 is the paper's, for all its trainings.
        warm: True if the vectors of a round are those of the last one. False draws them anew: a
            random projection of the difference, for weights whose differences change quickly.
        seed: Seed of the first vectors, the same on all sites.
    """

    rank: int = 1
    gamma: float = 1.0
    warm: bool = True
    seed: int = 0
    reads_start = False

    def __post_init__(self) -> None:
        require(
            type(self.rank) is int and self.rank >= 1, self, "rank", "a whole number, 1 or more"
        )
        require_gamma(self, 2)
        require(type(self.warm) is bool, self, "warm", "True or False")

    def end(self, start: Sequence[Tensor], first: int, second: int, *, is_first: bool) -> End:
        """Returns an end whose vectors are drawn from the seed."""
        return _PowerEnd(self, start, f"{self.seed} {first} {second}", is_first=is_first)

    def most_bytes(self, start: Sequence[Tensor]) -> int:
        """Returns the bytes of the longer one of two letters in a row."""
        return max(nbytes_of(_letter(start, self.rank, side)) for side in (0, 1))

    def travels(self, t: Tensor) -> str:
        """Returns "low rank" for a matrix, unless it travels whole."""
        return "low rank" if _rank(t, self.rank) else "dense"


class _PowerEnd:
    """One end: vectors p and q per matrix, alike at both ends.

    Args:
        method: the settings.
        start: gives shapes and dtypes.
        edge: says which edge it is.
        is_first: whether the difference is taken as this site's minus the other's.
    """

    def __init__(
        self, method: PowerGossip, start: Sequence[Tensor], edge: str, *, is_first: bool
    ) -> None:
        self._method, self._edge, self._is_first, self._start = method, edge, is_first, start
        self._matrices = [k for k, t in enumerate(start) if self._rank(t)]
        self.memory = Memory()  # whose round the draw asks for
        self.memory.kept = self._all_drawn()

    def say(self, weights: Weights) -> Tensor:
        bases, products = iter(self._bases()), list[Tensor]()
        for k, x in enumerate(weights.tensors):
            if k in self._matrices:
                products.append(self._side(_as_matrix(x)) @ next(bases))
            else:
                products.append(x)
        return bytes_of(products)

    def hear(self, own: Tensor, other: Tensor) -> list[Tensor]:
        told = self._read(other)
        bases, found, new = self._bases(), list[Tensor](), list[Tensor]()
        each = iter(bases)
        for k, (mine, theirs) in enumerate(zip(self._read(own), told, strict=True)):
            # Both ends form the same difference, so that they keep the same vectors to the bit.
            d = mine - theirs if self._is_first else theirs - mine
            if k in self._matrices:
                basis = next(each)
                new.append(d)
                change = d @ basis.mT if self._is_odd else basis @ d.mT
                d = change.view(self._start[k].shape).to(self._start[k].dtype)
            found.append(d.neg_() if self._is_first else d)
        self.memory.kept = {"p": new, "q": bases} if self._is_odd else {"p": bases, "q": new}
        self.memory.round += 1
        if not self._method.warm:
            self.memory.kept = self._all_drawn()
        return found

    @property
    def _is_odd(self) -> bool:
        """True in the first round, the third and so on."""
        return self.memory.round % 2 == 0

    def _side(self, x_MN: Tensor) -> Tensor:
        """Returns X, or Xᵀ where it is the other side's turn."""
        x_MN = x_MN.to(wide(x_MN.dtype))
        return x_MN if self._is_odd else x_MN.mT

    def _bases(self) -> list[Tensor]:
        """Returns orthonormal columns of what the last round left."""
        left = self.memory.kept["q" if self._is_odd else "p"]
        pairs = zip(self._matrices, left, strict=True)
        return [orthonormal(self._not_zero(y, k)[None])[0] for k, y in pairs]

    def _not_zero(self, y: Tensor, k: int) -> Tensor:
        """Returns y, or new vectors where it is 0: from there no iteration would ever turn."""
        if bool((y != 0).any(dim=0).all()) and bool(y.isfinite().all()):
            return y
        return self._drawn(k, rows=not self._is_odd)

    def _all_drawn(self) -> dict[str, list[Tensor]]:
        sides = {"p": True, "q": False}
        return {
            name: [self._drawn(k, rows=rows) for k in self._matrices]
            for name, rows in sides.items()
        }

    def _drawn(self, k: int, *, rows: bool) -> Tensor:
        x_MN = _as_matrix(self._start[k])
        seed = seed_of(self._edge, self.memory.round, k, rows)
        like = x_MN.new_empty(0, dtype=wide(x_MN.dtype))
        return drawn(x_MN.shape[0 if rows else 1], self._rank(x_MN), seed, like)

    def _rank(self, t: Tensor) -> int:
        return _rank(t, self._method.rank)

    def _read(self, content: Tensor) -> list[Tensor]:
        plain = _letter(self._start, self._method.rank, 0 if self._is_odd else 1)
        return tensors_of(content, plain, self._start[0].device)


def _letter(start: Sequence[Tensor], most: int, side: int) -> list[Plain]:
    """Returns what a letter has for each weight: its product, of one side, or all of it."""
    found = list[Plain]()
    for t in start:
        if rank := _rank(t, most):
            found.append(Plain((_as_matrix(t).shape[side], rank), wide(t.dtype)))
        else:
            found += plain_of([t])
    return found


def _rank(t: Tensor, most: int) -> int:
    """Returns the columns for a weight: 0 for one that travels whole."""
    if t.dim() < 2 or not t.numel() or t.is_complex():
        return 0
    m, n = _as_matrix(t).shape
    rank = min(most, m, n)
    return rank if rank * max(m, n) < m * n else 0


def _as_matrix(t: Tensor) -> Tensor:
    """Returns a view (m, n) of a weight: outputs by all else; (size, 1) of a vector."""
    return t.flatten(1) if t.dim() > 1 else t.reshape(-1, 1)
