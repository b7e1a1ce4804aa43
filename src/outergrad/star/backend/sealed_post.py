"""The messages and sums of a process group, of which the hub can read none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor

from outergrad.messages.raw import content
from outergrad.star.backend.agreed_sums import AgreedSum, HiddenSums, InOrder, hidden_integers
from outergrad.star.backend.post import LARGE_BYTES, OpenPost, Post, Write, code_of
from outergrad.star.backend.works import Awaited, Rooms, Waiting, in_words
from outergrad.star.frames import ALL, Kind, Place
from outergrad.star.group_seal import KEY_BYTES, LONGER_BYTES, GroupSeal
from outergrad.star.line import Line
from outergrad.star.sealing import Seal
from outergrad.star.sums import added

_ENDS_S = 5.0
"""Longest time, seconds, for which a group that ends waits for sums that it has begun."""


class SealedPost(Post):
    """Messages that sites encrypt for each other, and sums under masks.

    Sums and means of floats are rounded to a unit; sums of integers are exact. Of other operations
    sites exchange the numbers, and each makes the result.

    Args:
        line: of this process.
        lanes: of the group, and of second rounds of its sums.
        ranks: of its sites in the run, ascending.
        seal: keys of this site in the run.
        patience_s: returns the longest time, seconds, in which nothing moves.

    Raises:
        ExchangeError: keys of other sites do not come.
    """

    def __init__(
        self,
        line: Line,
        lanes: tuple[int, int],
        ranks: Sequence[int],
        seal: Seal,
        patience_s: Callable[[], float],
    ) -> None:
        self._line, self.lane, self._ranks, self._patience_s = line, lanes[0], ranks, patience_s
        self._plain, self._in_order = OpenPost(line, self.lane), InOrder()
        self._others = [rank for rank in ranks if rank != line.rank]
        pairs, masks = (
            seal.secrets_of_group(self.lane, self._others, use) for use in (b"messages", b"masks")
        )
        self._seal = GroupSeal(pairs, masks, line.rank, line.named)
        self._exchange_keys()
        self._sums = HiddenSums(line, self._seal.masks(), lanes, len(ranks))

    def _exchange_keys(self) -> None:
        place = self._line.place(Kind.EACH, self.lane)
        keys = self.expect(place, dict.fromkeys(self._others, KEY_BYTES), self._learn)
        for rank in self._others:
            self.send(place, self._seal.key, rank)
        try:
            keys.take(self._line, self._patience_s())
        except Exception as error:
            raise in_words(error, self._line, self._patience_s()) from error

    def _learn(self, rooms: Rooms) -> None:
        for rank, key in rooms.items():
            self._seal.learn(rank, bytes(key))

    def send(self, place: Place, payload: bytes, to: int = ALL) -> None:
        """Starts to send a message to all sites of the group, or to one."""
        self._line.send(place, self._seal.sealed(place, payload, to), to)

    def expect(
        self,
        place: Place,
        sizes: Mapping[int, int],
        then: Callable[[Rooms], None],
        source: int = -1,
    ) -> Awaited:
        """Expects messages, which are decrypted."""
        sealed = {rank: size + LONGER_BYTES for rank, size in sizes.items()}
        arrival = self._line.expect(place, sealed)
        return Awaited(place, arrival, lambda rooms: then(self._opened(place, rooms)), source)

    def _opened(self, place: Place, rooms: Rooms) -> Rooms:
        to = ALL if place.kind == Kind.GATHER else self._line.rank
        opened = {r: self._seal.opened(place, r, room.data, to) for r, room in rooms.items()}
        return {rank: np.frombuffer(clear, np.uint8) for rank, clear in opened.items()}

    def reduce(self, numbers: Tensor, operation: str, to: int, then: Write | None) -> list[Waiting]:
        """Starts a sum, or another operation, over the sites."""
        if operation not in ("sum", "mean"):
            return self._exchanged(numbers, code_of(numbers, operation), to, then)
        if not numbers.is_floating_point():
            return [*hidden_integers(self._sums, numbers, to, then)]
        total = AgreedSum(self._sums, numbers, operation, to, then)
        self._in_order.add(lambda: total.begin_second(self._patience_s()))
        return [total]

    def _exchanged(self, numbers: Tensor, code: int, to: int, then: Write | None) -> list[Waiting]:
        """Exchanges the numbers, of which each site makes what a hub would."""
        if numbers.nbytes * len(self._ranks) > LARGE_BYTES:
            for one in self.barrier():
                one.take(self._line, self._patience_s())
        own, kind = content(numbers), Kind.GATHER if to == ALL else Kind.EACH
        at = self._line.place(kind, self.lane, code)

        def make(rooms: Rooms) -> None:
            parts = {rank: room.data for rank, room in rooms.items()} | {self._line.rank: own}
            assert then is not None
            made = added([parts[rank] for rank in self._ranks], code)
            then(np.frombuffer(bytearray(made), np.uint8))

        awaited: list[Waiting] = []
        if then is not None:
            awaited.append(self.expect(at, dict.fromkeys(self._others, len(own)), make))
        if to != self._line.rank:
            self.send(at, own, to)
        return awaited

    def barrier(self) -> list[Waiting]:
        """Starts to wait for all sites of the group, in which there is nothing to hide."""
        return self._plain.barrier()

    def end(self) -> None:
        """Ends the thread of the group's sums."""
        self._in_order.end(_ENDS_S)
