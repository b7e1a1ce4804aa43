"""A transport without a network, on which all other sites do what this one does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outergrad.comm.cost import Collective, RingCost
from outergrad.comm.relay import GatherInPieces, piece_lengths
from outergrad.comm.trace import Tracer
from outergrad.comm.work import RELAY_LANE, SUMS_LANE, tag_of
from outergrad.core.cost import CostModel, Traffic
from outergrad.core.transport import Board, Comm, Enough
from outergrad.messages.wire import as_from


class Mirrored:
    """A collective whose result is there at once."""

    def __init__(self, result: Any, tracer: Tracer, index: int) -> None:
        self._result, self._tracer, self._index = result, tracer, index

    def wait(self) -> Any:
        """Returns the result, and notes that it was awaited."""
        self._tracer.awaited(self._index)
        return self._result


class Mirror:
    """The key that the sessions on one mirror share (`Comm.key`)."""


class MirrorBoard(Board):
    """A board of sites that write what this one writes, each under a key that ends in its rank."""

    def __init__(self) -> None:
        self._put: dict[str, bytes] = {}

    def first(self, key: str, text: str) -> str:
        """Returns the text: no other site writes one."""
        return text

    def slot(self, key: str) -> str | None:
        """Returns None: no site is lost, and none asks for anything."""
        return None

    def put(self, key: str, content: bytes) -> None:
        """Keeps the content, under the key without its rank."""
        self._put[key.rpartition(" ")[0]] = content

    def get(self, key: str) -> bytes | None:
        """Returns the content that this site has put, for the key of any rank."""
        return self._put.get(key.rpartition(" ")[0])

    def farewell(self, site: int, session: int) -> str | None:
        """Returns None: no site leaves."""
        return None


class MirrorComm(Comm):
    """The collectives of site 0 among sites with the same rows and the same gradients.

    Bytes are counted as by `TorchComm`. The time of copies and sums that stand for the network is
    not counted as the site's own.

    Args:
        sites: Number of sites, this one too.
        tracer: Records the collectives that are started and awaited.
        cost: Cost model of the collectives; that of `TorchComm` if None.
    """

    def __init__(self, sites: int, tracer: Tracer, cost: CostModel | None = None) -> None:
        self.rank, self.world_size = 0, sites
        self.sent_bytes = self.received_bytes = 0
        self.device, self.key, self.patience_s = torch.device("cpu"), Mirror(), math.inf
        self.cost, self._tracer = cost or RingCost(sites), tracer
        if sites > 1 and isinstance(self.cost, RingCost):  # process groups have a store
            self.board = MirrorBoard()
        self.passes_on = isinstance(self.cost, RingCost)
        self._turn, self._posted = 0, Counter[int]()

    def take_turn(self, turn: int) -> None:
        """Sets the turn, and forgets the receives of turns that are over."""
        self._turn = turn
        if turn:
            tags = range(tag_of(turn, 0), tag_of(turn + 2, 0))
            self._posted = Counter({tag: n for tag, n in self._posted.items() if tag in tags})

    def expect(
        self, sizes: Sequence[int], turn: int, dtype: torch.dtype = torch.uint8, lane: int = 0
    ) -> None:
        """Counts receives that a process group would post ahead, which saves it a delay."""
        if isinstance(self.cost, RingCost):
            self._posted[tag_of(turn, lane)] += 1

    def expect_in_pieces(self, sizes: Sequence[int], turn: int, lane: int = 0) -> None:
        """Counts the receives of both rounds."""
        for own in (lane, RELAY_LANE):
            self.expect(sizes, turn, lane=own)

    def expect_sum(self, size: int, turn: int, dtype: torch.dtype) -> None:
        """Counts the receives of a sum that sites of a process group may post ahead."""
        if isinstance(self.cost, RingCost):
            self._posted[tag_of(turn, SUMS_LANE)] += 1

    def all_reduce(self, t: Tensor) -> Mirrored:
        """Multiplies t by the number of sites, in place."""
        with self._tracer.away():
            traffic = self.cost.all_reduce(t.nbytes)
            summed = t.mul_(self.world_size)
            total = Traffic(*(self.world_size * nbytes for nbytes in traffic))
            return self._exchanged(summed, Collective.ALL_REDUCE, traffic, total, SUMS_LANE)

    def all_gather(self, t: Tensor, sizes: Sequence[int], lane: int = 0) -> Mirrored:
        """Returns this site's tensor as it would come from every site, with the rank of each."""
        with self._tracer.away():
            parts = self._as_from_all(t, sizes)
            nbytes = sum(part.nbytes for part in parts)
            traffic = self.cost.all_gather(t.nbytes, nbytes - t.nbytes)
            total = self.cost.all_gather(nbytes, (self.world_size - 1) * nbytes)
            return self._exchanged(parts, Collective.ALL_GATHER, traffic, total, lane)

    def all_gather_in_pieces(
        self, t: Tensor, sizes: Sequence[int], lane: int = 0
    ) -> GatherInPieces:
        """Returns what `all_gather` would, after two rounds."""
        others, (own, *theirs) = self.world_size - 1, piece_lengths(sizes)
        passed_on = t.itemsize * (own + sum(theirs))
        with self._tracer.away():
            found = self._as_from_all(t, sizes)
            traffic = self.cost.all_to_all(others * own * t.itemsize, sum(theirs) * t.itemsize)
            total = self.cost.all_to_all(others * passed_on, others * passed_on)
            first = self._exchanged(found, Collective.ALL_TO_ALL, traffic, total, lane)

        def pass_on(messages: list[Tensor]) -> Mirrored:
            traffic = self.cost.all_gather(passed_on, others * passed_on)
            total = Traffic(*(self.world_size * nbytes for nbytes in traffic))
            return self._exchanged(messages, Collective.ALL_GATHER, traffic, total, RELAY_LANE)

        return GatherInPieces(first, pass_on)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Mirrored:
        """Returns this site's own part as it would come from every site, with the rank of each."""
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
        """Does nothing: this is site 0."""

    def give_up(
        self, text: str, final: str, enough: Enough, patience_s: float, session: int = 0
    ) -> list[str | None]:
        """Returns the text for every site: none is lost here."""
        return [text] * self.world_size

    def close(self) -> None:
        """Does nothing: there are no connections."""
