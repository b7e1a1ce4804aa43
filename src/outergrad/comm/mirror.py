"""A transport without a network: all other sites do what this one does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outergrad.comm.cost import Collective, RingCost
from outergrad.comm.tags import SUMS_LANE, tag_of
from outergrad.comm.trace import Tracer
from outergrad.core.cost import CostModel, Traffic
from outergrad.core.transport import Board, Comm, Enough
from outergrad.messages.wire import as_from


class Mirrored:
    """A collective whose result is there at once."""

    def __init__(self, result: Any, tracer: Tracer, index: int) -> None:
        self._result, self._tracer, self._index = result, tracer, index

    def wait(self) -> Any:
        """The result."""
        self._tracer.awaited(self._index)
        return self._result


class Mirror:
    """What sessions on one mirror have in common."""


class MirrorBoard(Board):
    """Of sites that write what this one writes, each under a key that ends with its number."""

    def __init__(self) -> None:
        self._put: dict[str, bytes] = {}

    def first(self, key: str, text: str) -> str:
        """The text: nobody else writes one."""
        return text

    def slot(self, key: str) -> str | None:
        """None: nobody is lost, and nobody asks."""
        return None

    def put(self, key: str, content: bytes) -> None:
        """Keeps it."""
        self._put[key.rpartition(" ")[0]] = content

    def get(self, key: str) -> bytes | None:
        """What this site has put."""
        return self._put.get(key.rpartition(" ")[0])

    def farewell(self, site: int, session: int) -> str | None:
        """None: nobody leaves."""
        return None


class MirrorComm(Comm):
    """The collectives of site 0 among sites with the same rows and the same gradients.

    Bytes are counted as by `TorchComm`. What copies and sums cost here, where they stand for the
    network, is not counted as the site's time.

    Args:
        sites: How many there are, this one too.
        tracer: Is told what is started and awaited.
        cost: What collectives cost; those of `TorchComm` if None.
    """

    def __init__(self, sites: int, tracer: Tracer, cost: CostModel | None = None) -> None:
        self.rank, self.world_size = 0, sites
        self.sent_bytes = self.received_bytes = 0
        self.device, self.key, self.patience_s = torch.device("cpu"), Mirror(), math.inf
        self.cost, self._tracer = cost or RingCost(sites), tracer
        if sites > 1 and isinstance(self.cost, RingCost):  # process groups have a store
            self.board = MirrorBoard()
        self._turn, self._posted = 0, Counter[int]()

    def take_turn(self, turn: int) -> None:
        """Receives of turns that are over are forgotten."""
        self._turn = turn
        if turn:
            tags = range(tag_of(turn, 0), tag_of(turn + 2, 0))
            self._posted = Counter({tag: n for tag, n in self._posted.items() if tag in tags})

    def expect(
        self, sizes: Sequence[int], turn: int, dtype: torch.dtype = torch.uint8, lane: int = 0
    ) -> None:
        """Counts receives that would be posted, which saves a delay on process groups."""
        if isinstance(self.cost, RingCost):
            self._posted[tag_of(turn, lane)] += 1

    def expect_sum(self, size: int, turn: int, dtype: torch.dtype) -> None:
        """The same of a sum that two sites would add up, if the link is such."""
        if isinstance(self.cost, RingCost) and self.world_size == 2:
            self._posted[tag_of(turn, SUMS_LANE)] += 1

    def all_reduce(self, t: Tensor) -> Mirrored:
        """As many times t as there are sites, in place."""
        with self._tracer.away():
            traffic = self.cost.all_reduce(t.nbytes)
            summed = t.mul_(self.world_size)
            total = Traffic(*(self.world_size * nbytes for nbytes in traffic))
            return self._exchanged(summed, Collective.ALL_REDUCE, traffic, total, SUMS_LANE)

    def all_gather(self, t: Tensor, sizes: Sequence[int], lane: int = 0) -> Mirrored:
        """Of every site what this one sends, under its own name."""
        with self._tracer.away():
            parts = self._as_from_all(t, sizes)
            nbytes = sum(part.nbytes for part in parts)
            traffic = self.cost.all_gather(t.nbytes, nbytes - t.nbytes)
            total = self.cost.all_gather(nbytes, (self.world_size - 1) * nbytes)
            return self._exchanged(parts, Collective.ALL_GATHER, traffic, total, lane)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Mirrored:
        """Of every site what this one has for itself, under its own name."""
        with self._tracer.away():
            own, nbytes = parts[0], sum(part.nbytes for part in parts)
            others = self.world_size - 1
            found = self._as_from_all(own, sizes)
            traffic = self.cost.all_to_all(nbytes - own.nbytes, others * own.nbytes)
            total = self.cost.all_to_all(others * nbytes, others * nbytes)
            return self._exchanged(found, Collective.ALL_TO_ALL, traffic, total)

    def _as_from_all(self, t: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return [t, *(as_from(rank, t, sizes[rank]) for rank in range(1, self.world_size))]

    def _exchanged(
        self, result: Any, collective: Collective, traffic: Traffic, total: Traffic, lane: int = 0
    ) -> Mirrored:
        self.sent_bytes += traffic.sent
        self.received_bytes += traffic.received
        tag = tag_of(self._turn, lane)
        is_expected = self._posted[tag] > 0
        self._posted[tag] -= is_expected
        index = self._tracer.started(collective, traffic, total, is_expected=is_expected)
        return Mirrored(result, self._tracer, index)

    def broadcast(self, t: Tensor) -> None:
        """Nothing: this is site 0."""

    def give_up(
        self, text: str, final: str, enough: Enough, patience_s: float, session: int = 0
    ) -> list[str | None]:
        """Nobody is lost here."""
        return [text] * self.world_size

    def close(self) -> None:
        """Nothing: there are no connections."""
