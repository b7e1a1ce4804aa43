"""The collectives of a star: every site has a line to the hub, which relays and sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outergrad.comm.cost import StarCost
from outergrad.comm.work import Ready
from outergrad.core.errors import ExchangeError, Failure
from outergrad.core.transport import Comm, Enough, Lines
from outergrad.messages.raw import content
from outergrad.star.arrivals import Arrival
from outergrad.star.board import AT_END, AT_EXIT, StarBoard
from outergrad.star.frames import ALL, Kind, Place
from outergrad.star.line import Line
from outergrad.star.masked_sums import ExactSum, MaskedSums
from outergrad.star.rounded_sums import RoundedSum, masked_sum
from outergrad.star.sealing import TAG_BYTES, Seal
from outergrad.star.sums import coded
from outergrad.star.units import Units

_WORD = "word"
"""Name of the text that a site leaves when it aborts."""


class StarComm(Comm):
    """The collectives of one session over a line.

    Args:
        line: of this process.
        key: shared by the sessions on that line.
        device: of the tensors.
        patience_s: timeout of a message, seconds.
        seal: encrypts messages and masks sums, if the hub must not read them.
        min_sites: least number of sites that go on without others; None if they do not.
        way: how messages travel, in words.
    """

    has_lines = True

    def __init__(
        self,
        line: Line,
        key: Any,
        device: torch.device,
        patience_s: float,
        seal: Seal | None = None,
        min_sites: int | None = None,
        way: str = "",
    ) -> None:
        self._line, self._home, self.device, self._seal = line, key, device, seal
        self.key = key
        self.rank, self.world_size = line.rank, len(line.names)
        self.names, self.epoch, self.min_sites = line.names, line.epoch, min_sites
        self.cost = StarCost(self.world_size)
        self.patience_s, self.way = patience_s, way
        self.sent_bytes = self.received_bytes = 0
        self._masked, self._units = None, Units()
        self.sums = "trusted" if seal is None else "masked"
        if seal is not None:
            self._masked = MaskedSums(line, seal.masks(), patience_s, self._book_sum)
        if self.world_size > 1 or min_sites is not None:  # else nobody could come back
            self.board = StarBoard(line, patience_s, seal)

    def sum_rounds(self, nbytes: int) -> int:
        """Returns 2 for a sum whose steps the sites may have to agree on before."""
        return 2 if self._masked is not None and self.world_size > 1 and nbytes else 1

    def take_turn(self, turn: int) -> None:
        """Notes that a step begins or has ended: sums of floats are rounded as in the last one."""
        self._units.take_turn(turn)

    def all_reduce(self, t: Tensor) -> StarWork | ExactSum | RoundedSum | Ready:
        """Sums t in place over the sites at the hub: in rank order and 64 bits, or under masks."""
        if self.world_size == 1 or not t.numel():
            return Ready(t)
        if self._masked is not None:
            return masked_sum(self._masked, self._units, t)
        self._book_sum(t.nbytes)
        place = self._line.place(Kind.SUM, 0, dtype=coded(_name(t)))
        arrival = self._line.expect(place, {ALL: t.nbytes})
        self._line.send(place, content(t))
        return self._work(place, arrival, lambda rooms: _copy_into(t, rooms[ALL]))

    def all_gather(self, t: Tensor, sizes: Sequence[int], lane: int = 0) -> StarWork | Ready:
        """Gathers every site's tensor on every site."""
        others = (sum(sizes) - sizes[self.rank]) * t.itemsize
        self._book(*self.cost.all_gather(t.nbytes, others))
        place = self._line.place(Kind.GATHER, lane)
        arrival = self._line.expect(place, self._expected(sizes, t.itemsize))
        self._send(place, t)
        return self._work(place, arrival, self._in_order(t.clone()))

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> StarWork | Ready:
        """Sends each site its own tensor."""
        own = parts[self.rank]
        sent = sum(part.nbytes for part in parts) - own.nbytes
        self._book(*self.cost.all_to_all(sent, (sum(sizes) - sizes[self.rank]) * own.itemsize))
        place = self._line.place(Kind.EACH, 0)
        arrival = self._line.expect(place, self._expected(sizes, own.itemsize))
        for rank, part in enumerate(parts):
            if rank != self.rank:
                self._send(place, part, rank)
        return self._work(place, arrival, self._in_order(own.clone()))

    def broadcast(self, t: Tensor) -> None:
        """Overwrites t with rank 0's; its bytes are not counted."""
        place = self._line.place(Kind.GATHER, 0)
        sizes = [t.numel(), *[0] * (self.world_size - 1)]
        arrival = self._line.expect(place, self._expected(sizes, t.itemsize))
        if self.rank == 0:
            self._send(place, t)
        self._work(place, arrival, lambda rooms: rooms and _copy_into(t, rooms[0])).wait()

    def exchange_with(self, sites: Sequence[int], number: int, most_bytes: int) -> Lines:
        """Opens lines to some other sites, each in a lane of the two at the hub.

        Raises:
            ExchangeError: the hub does not answer, or has no lane left.
        """
        from outergrad.star.lines import StarLines  # few sessions need it

        ranks = {site: site for site in sites}
        about = "outergrad", number, most_bytes, self._seal
        return StarLines(self, self._line, ranks, *about)

    def took_part(self, session: int, first: int, last: int) -> None:
        """Tells the hub of this site's steps, which it logs when all sites have told it."""
        self._line.tell(Kind.PART, f"{session} {first} {last}".encode())

    def why_gone(self, site: int) -> str:
        """Returns what the hub has said of a site that is gone; "" of others."""
        return self._line.gone.get(site, "")

    def notes(self, session: int) -> StarNotes:
        """Returns the mailbox for this site's farewells."""
        return StarNotes(self._line, session)

    def give_up(
        self, text: str, final: str, enough: Enough, patience_s: float, session: int = 0
    ) -> list[str | None] | None:
        """Leaves a text at the hub, leaves the run, and gathers the texts of all sites.

        Returns None if the hub is out of reach and the texts are not enough.
        """
        line = self._line
        line.abandon()
        line.leave_text(_WORD, text)
        line.leave()
        if not line.wait_for(lambda: enough(self._texts(session)), patience_s):
            line.leave_text(_WORD, final)
        texts = self._texts(session)
        return None if line.has_failed and not enough(texts) else texts

    def close(self) -> None:
        """Leaves the run, of which the hub tells the others."""
        self._line.leave()

    def sealed(self) -> StarComm:
        """Returns the same sites' collectives, encrypted by keys that their certificates sign."""
        try:
            return self._home.sealed(self)
        except (RuntimeError, ValueError) as error:
            raise ExchangeError(str(error), kind=Failure.TRANSPORT) from error

    def go_on(self, sites: Sequence[int], coming: Sequence[str] = ()) -> Callable[[], StarComm]:
        """Begins a new run at the hub, over a line of its own; returns a call that opens it."""
        before, again = self._home, self._home.go_on(sites, coming)

        def opened() -> StarComm:
            comm = again.open(self.device, self.patience_s)
            before.dialler.end()
            return comm

        return opened

    def _texts(self, session: int) -> list[str | None]:
        """Returns every site's text: that of its abort, or else its farewell."""
        left, ended = self._line.texts, StarBoard(self._line, self.patience_s).farewell
        sites = range(self.world_size)
        return [left.get((site, _WORD)) or ended(site, session) for site in sites]

    def _expected(self, sizes: Sequence[int], itemsize: int) -> dict[int, int]:
        others = (site for site in range(self.world_size) if site != self.rank and sizes[site])
        longer = 0 if self._seal is None else TAG_BYTES
        return {site: sizes[site] * itemsize + longer for site in others}

    def _send(self, place: Place, t: Tensor, recipient: int = ALL) -> None:
        """Sends a tensor, unless it is empty or there is no other site."""
        if not t.numel() or self.world_size == 1:
            return
        payload = content(t)
        if self._seal is not None:
            payload = self._seal.sealed(place, payload, recipient)
        self._line.send(place, payload, recipient)

    def _in_order(self, own: Tensor) -> Callable[[Mapping[int, np.ndarray]], list[Tensor]]:
        def found(rooms: Mapping[int, np.ndarray]) -> list[Tensor]:
            parts = [own.new_empty(0)] * self.world_size
            parts[self.rank] = own
            for site, room in rooms.items():
                parts[site] = _tensor(room, own)
            return parts

        return found

    def _book_sum(self, nbytes: int) -> None:
        self._book(*self.cost.all_reduce(nbytes))

    def _book(self, sent: int, received: int) -> None:
        self.sent_bytes += sent
        self.received_bytes += received

    def _work(
        self, place: Place, arrival: Arrival, then: Callable[[Mapping[int, np.ndarray]], Any]
    ) -> StarWork:
        return StarWork(lambda: self._arrived(place, arrival), then)

    def _arrived(self, place: Place, arrival: Arrival) -> dict[int, np.ndarray]:
        rooms, seal = self._line.wait(place, arrival, self.patience_s), self._seal
        if seal is None:
            return rooms
        of_all = place.kind == Kind.GATHER
        opened = {s: seal.opened(place, s, room.data, of_all=of_all) for s, room in rooms.items()}
        return {s: np.frombuffer(bytearray(clear), np.uint8) for s, clear in opened.items()}


class StarWork:
    """A collective under way."""

    def __init__(
        self,
        arrived: Callable[[], Mapping[int, np.ndarray]],
        then: Callable[[Mapping[int, np.ndarray]], Any],
    ) -> None:
        self._arrived, self._then = arrived, then

    def wait(self) -> Any:
        """Blocks until all messages have come, and returns the result."""
        return self._then(self._arrived())


class StarNotes:
    """The mailbox at the hub for the farewells of a site that leaves in order."""

    def __init__(self, line: Line, session: int) -> None:
        self._line, self._session = line, session

    def leave_at_end(self, text: str, *, of_process: bool) -> None:
        """Leaves a farewell at the hub, which keeps it until the others have it."""
        name = AT_EXIT if of_process else AT_END.format(self._session)
        self._line.leave_text(name, text)

    def stay(self, sites: Sequence[int]) -> None:
        """Does nothing: the hub stays when this site goes."""


def _tensor(room: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(room).view(like.dtype).to(like.device)


def _copy_into(t: Tensor, room: np.ndarray) -> Tensor:
    return t.copy_(_tensor(room, t).view(t.shape))


def _name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")
