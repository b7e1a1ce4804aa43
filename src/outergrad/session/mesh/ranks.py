"""Failure reports between all ranks of a mesh, across both of its dimensions."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from outergrad.comm.backends import USUAL_HOST, ends_with_a_site, store_of
from outergrad.comm.board import StoreBoard
from outergrad.comm.failure_mailbox import FailureMailbox
from outergrad.comm.words import words_of_all
from outergrad.core.errors import BoardGoneError, ExchangeError
from outergrad.core.transport import Comm, Enough, MeshRanks

_BITS = 62


class Meeting:
    """Place in a store where every rank of a mesh can leave a text for all others.

    A process group prefixes its keys in the store, and ranks of other groups do not know the
    prefix; but the store beneath is mostly the same. So the ranks draw a prefix for this mesh, and
    check whether they find each other there.

    Args:
        group: a process group of this rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._root = None if group is None else _root_of(store_of(group))
        self.store: Store | None = None

    def draw(self, site: Comm, local: Comm) -> int:
        """Returns a random number of the first rank, the same on all; a collective of all ranks."""
        own = secrets.randbits(_BITS)
        with ranks_named(local):
            inside = words_of_all(local, [own])[0]
        return words_of_all(site, inside)[0][0]

    def write(self, drawn: int, number: int) -> StoreBoard | None:
        """Writes this rank's name under the prefix; returns the board, None without a store."""
        if self._root is None:
            return None
        self.store = PrefixStore(f"outergrad/mesh/{drawn}", self._root)
        board = StoreBoard(self.store)
        try:
            board.first(f"rank {number}", "here")
        except BoardGoneError:
            self.store = None
        return board

    def look(self, board: StoreBoard | None, ranks: int) -> None:
        """Gives the place up unless the names of all ranks, which have written, can be read."""
        try:
            if board is None or None in [board.slot(f"rank {n}") for n in range(ranks)]:
                self.store = None
        except BoardGoneError:
            self.store = None

    @property
    def host(self) -> int | None:
        """Number of the rank whose process holds the store; None if none does."""
        return USUAL_HOST if self.store is not None and ends_with_a_site(self.store) else None


def _root_of(store: Store | None) -> Store | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


class Ranks(MeshRanks):
    """Ranks of a mesh, numbered site by site, for the sessions on one of its transports.

    Args:
        numbers: numbers of the ranks of that transport.
        number: number of this rank.
        sites: number of sites.
        local: number of ranks per site.
        comms: all transports of this rank, which are closed together.
        meeting: place for the failure reports of the mesh.
        peers: numbers of the ranks that take part in the steps of a session on that transport.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        number: int,
        sites: int,
        local: int,
        comms: Sequence[Comm],
        meeting: Meeting,
        peers: Sequence[int],
    ) -> None:
        self._numbers, self.number, self._local = numbers, number, local
        self.total, self._comms, self._meeting = sites * local, comms, meeting
        self.peers = peers
        self.keys = [comm.key for comm in comms]

    @property
    def host(self) -> int | None:
        """Number of the rank whose process holds the place for texts; None if none does."""
        return self._meeting.host

    @property
    def has_place(self) -> bool:
        """True if there is a place where all ranks can leave texts."""
        return self._meeting.store is not None

    def numbers_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Returns the numbers, in the mesh, of ranks of the transport."""
        return tuple(self._numbers[rank] for rank in ranks)

    def place_of(self, number: int) -> tuple[int, int]:
        """Returns the site of a rank, and its local rank."""
        return divmod(number, self._local)

    def words(self, session: int, limit_s: float | None = None) -> FailureMailbox | None:
        """Returns the place for texts of a session; None if the ranks share no store."""
        store = self._meeting.store
        if store is None:
            return None
        return FailureMailbox(store, self.number, self.total, session, limit_s)

    def give_up(
        self, text: str, final: str, enough: Enough, patience_s: float, session: int
    ) -> list[str | None] | None:
        """Leaves a text, closes all transports of this rank, and gathers the texts of all ranks."""
        words = self.words(session)
        if words is not None:
            words.leave(text)
        for comm in self._comms:
            comm.close()
        return None if words is None else words.gather(enough, patience_s, final)


@contextmanager
def ranks_named(comm: Comm) -> Iterator[None]:
    """Adds the numbers of unreachable ranks to exchange errors inside the block."""
    try:
        yield
    except ExchangeError as error:
        if comm.mesh is not None and not error.ranks:
            error.ranks = comm.mesh.numbers_of(error.sites)
        raise
