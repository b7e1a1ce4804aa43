"""CHOCO: neighbours send reduced changes of public copies of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outergrad.core.coding import Wire
from outergrad.gossip.content import bytes_of, nbytes_of, tensors_of
from outergrad.gossip.ends import End, GossipMethod, Memory, Weights, require_gamma
from outergrad.gossip.reductions import Reduction, reduction_of, seed_of
from outergrad.linalg.finite import is_finite
from outergrad.wire import Plain


@dataclass(frozen=True, kw_only=True)
class Choco(GossipMethod):
    """Neighbours send each other few bytes of how their weights differ from what is known of them.

    Choose it where few bytes per step count more than memory and tuning: `gamma` has to be searched
    for, and is the smaller the less is sent. `og.gossip.PowerGossip` needs no such search.

    Both ends of an edge keep a copy of each other's weights, as far as these were told:
    q = Q(x - x̂) travels, x̂ := x̂ + q, and x := x + gamma w (x̂ of the other - x̂ of its own). What Q
    leaves out stays in x - x̂, and is told later. Source: Koloskova, Stich and Jaggi,
    "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication",
    arXiv 1902.00340, algorithm 2, and arXiv 1907.09356 for deep networks.

    In the paper a site has one public copy for all neighbours, which costs two models of memory
    however many there are. Here it has one per neighbour, 2 models of memory per edge. So a
    neighbour may be away, and others go on: copies of one edge alone stand still.

    Attributes:
        reduce: Q: a codec, as `og.wire.TopK(0.01)` or `og.wire.Sign()`, `og.gossip.RandomK(...)`
            or `og.gossip.LowRank(...)`.
        gamma: Step towards the neighbours' copies, above 0 and up to 1. Too large a one diverges.
            Found by others: 0.0375 for the largest 1 % of entries, 0.45 for signs (ResNet-20,
            8-ring, arXiv 2008.01425).
        seed: Seed of random choices, the same on all sites.
    """

    reduce: Reduction | Wire
    gamma: float
    seed: int = 0

    def __post_init__(self) -> None:
        require_gamma(self, 1)
        object.__setattr__(self, "reduce", reduction_of(self.reduce, "Choco"))

    def end(self, start: Sequence[Tensor], first: int, second: int, *, is_first: bool) -> End:
        """Returns an end whose copies are the weights at the start of the session."""
        return _ChocoEnd(self, start, f"{self.seed} {first} {second}")

    def most_bytes(self, start: Sequence[Tensor]) -> int:
        """Returns the bytes of a letter, which do not change."""
        reduce: Reduction = self.reduce  # type: ignore[assignment]
        return sum(nbytes_of(reduce.plain(tuple(t.shape), t.dtype)) for t in start)

    def travels(self, t: Tensor) -> str:
        """Returns "compressed"."""
        return "compressed"


class _ChocoEnd:
    """One end: copies of both sites' weights, alike at both ends.

    Args:
        method: the settings.
        start: weights of both sites when the session began.
        edge: says which edge it is.
    """

    def __init__(self, method: Choco, start: Sequence[Tensor], edge: str) -> None:
        mine, theirs = ([t.clone() for t in start] for _ in range(2))
        self.memory = Memory(mine=mine, theirs=theirs)
        self._reduce: Reduction = method.reduce  # type: ignore[assignment]
        self._edge = edge
        self._plain: list[list[Plain]] = [
            self._reduce.plain(tuple(t.shape), t.dtype) for t in start
        ]

    def say(self, weights: Weights) -> Tensor:
        pairs = zip(weights.tensors, self.memory.kept["mine"], strict=True)
        parts = [self._reduce.encode(x - y, self._seed(k)) for k, (x, y) in enumerate(pairs)]
        return bytes_of([t for part in parts for t in part])

    def hear(self, own: Tensor, other: Tensor) -> list[Tensor]:
        mine, theirs = self.memory.kept["mine"], self.memory.kept["theirs"]
        told = self._decoded(other)
        for copies, found in ((mine, self._decoded(own)), (theirs, told)):
            for copy, q in zip(copies, found, strict=True):
                if is_finite(q):  # both ends leave out the same; a copy would stay NaN for ever
                    copy.add_(q)
        self.memory.round += 1
        return [x - y for x, y in zip(theirs, mine, strict=True)]

    def _decoded(self, content: Tensor) -> list[Tensor]:
        flat = [one for parts in self._plain for one in parts]
        each = iter(tensors_of(content, flat, self.memory.kept["mine"][0].device))
        return [
            self._reduce.decode([next(each) for _ in parts], tuple(t.shape), self._seed(k)).to(
                t.dtype
            )
            for k, (t, parts) in enumerate(zip(self.memory.kept["mine"], self._plain, strict=True))
        ]

    def _seed(self, index: int) -> int:
        return seed_of(self._edge, self.memory.round, index)
