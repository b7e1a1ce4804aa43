"""The ends of an edge: what two neighbours tell each other of their weights, and dense gossip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from outergrad.core.types import StateDict
from outergrad.gossip.content import bytes_of, plain_of, tensors_of
from outergrad.methods.common import require


class Weights:
    """The weights of a site at the beginning of a round, the same for all its edges.

    Args:
        tensors: the weights, in an order that is the same on all sites.

    Attributes:
        tensors: as the argument.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [t.detach() for t in tensors]

    @cached_property
    def content(self) -> Tensor:
        """Bytes of all weights."""
        return bytes_of(self.tensors)


class Memory:
    """The tensors that an end keeps from round to round, the same at both ends of its edge.

    Args:
        kept: lists of tensors, by name.

    Attributes:
        kept: as the argument, as they are now.
        round: number of rounds that have changed them.
    """

    def __init__(self, **kept: list[Tensor]) -> None:
        self.kept, self.round = kept, 0

    def state(self) -> StateDict:
        """Returns copies of the tensors, and the number of rounds."""
        copies = {name: [t.clone() for t in tensors] for name, tensors in self.kept.items()}
        return {**copies, "round": self.round}

    def load(self, state: StateDict) -> None:
        """Goes on from a saved state."""
        for name, tensors in self.kept.items():
            for t, saved in zip(tensors, state[name], strict=True):
                t.copy_(saved)
        self.round = state["round"]


class End(Protocol):
    """One end of an edge; it changes in `hear` alone, so that a round counts at both or neither.

    A round: both ends say something of their weights, and hear what the other said. What `hear`
    returns at one end is, to the bit, the negative of what it returns at the other. So a step by
    it, times a number that both know, keeps the sum of both sites' weights.

    Attributes:
        memory: what it keeps from round to round.
    """

    memory: Memory

    def say(self, weights: Weights) -> Tensor:
        """Returns the content of this round's letter: a 1-D tensor of uint8 on the host."""
        ...

    def hear(self, own: Tensor, other: Tensor) -> list[Tensor]:
        """Returns the other site's weights minus this one's, as far as letters have told.

        Args:
            own: the content that this end said in the round.
            other: the content that the other end said.

        Raises:
            ValueError: the other's content is of a wrong length.
        """
        ...


class GossipMethod(Protocol):
    """Settings of a way in which neighbours tell each other of their weights; frozen."""

    gamma: float
    """Share of the difference that an exchange removes, times the edge's weight."""
    reads_start: bool = True
    """Whether ends read the values of `start`; else a site keeps no copy of these."""

    def end(self, start: Sequence[Tensor], first: int, second: int, *, is_first: bool) -> End:
        """Returns one end of a new edge.

        Args:
            start: weights that both sites had when the session began, which nobody changes; of the
                same shapes, dtypes and device, without the values, unless `reads_start`.
            first: the lower rank of the edge.
            second: the higher one.
            is_first: whether this end is at the first.
        """
        ...

    def most_bytes(self, start: Sequence[Tensor]) -> int:
        """Returns the largest content of a letter."""
        ...

    def travels(self, t: Tensor) -> str:
        """Returns in a word how a weight travels, for the coverage table."""
        return "dense"


@dataclass(frozen=True)
class Whole(GossipMethod):
    """Neighbours tell each other all their weights: the default of `og.Gossip`.

    Attributes:
        gamma: As for all methods, above 0 and up to 2; 1 by default.
    """

    gamma: float = 1.0
    reads_start = False

    def __post_init__(self) -> None:
        require_gamma(self, 2)

    def end(self, start: Sequence[Tensor], first: int, second: int, *, is_first: bool) -> End:
        """Returns an end that keeps nothing."""
        return _WholeEnd(start)

    def most_bytes(self, start: Sequence[Tensor]) -> int:
        """Returns the bytes of the model."""
        return sum(t.nbytes for t in start)


class _WholeEnd:
    def __init__(self, start: Sequence[Tensor]) -> None:
        self._plain, self._device, self.memory = plain_of(start), start[0].device, Memory()

    def say(self, weights: Weights) -> Tensor:
        return weights.content

    def hear(self, own: Tensor, other: Tensor) -> list[Tensor]:
        mine = tensors_of(own, self._plain, self._device)
        theirs = tensors_of(other, self._plain, self._device)
        return [x.sub_(y) for x, y in zip(theirs, mine, strict=True)]


def require_gamma(method: Any, most: int) -> None:
    """Checks the step of a method.

    Raises:
        ValueError: it is no number above 0 and up to `most`.
    """
    is_number = type(method.gamma) in (int, float)
    valid = f"a number above 0 and up to {most}"
    require(is_number and 0 < method.gamma <= most, method, "gamma", valid)
