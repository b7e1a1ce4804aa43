"""What the ranks of a mesh tell each other when some are lost, across both of its dimensions."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from outergrad.comm.backends import store_of
from outergrad.comm.board import StoreBoard
from outergrad.comm.last_words import LastWords
from outergrad.comm.store_host import USUAL_HOST, ends_with_a_site
from outergrad.comm.words import words_of_all
from outergrad.core.errors import BoardGoneError, ExchangeError
from outergrad.core.transport import Comm, Enough, MeshRanks

_BITS = 62


class Meeting:
    """A place in a store where every rank of a mesh can leave a text for all others.

    A group has keys of its own in a store, which ranks of other groups do not know; but the store
    below is mostly the same. The ranks draw a name for the keys of this mesh and look whether they
    find each other there.

    Args:
        group: one of this rank's.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._root = None if group is None else _root_of(store_of(group))
        self.store: Store | None = None

    def draw(self, site: Comm, local: Comm) -> int:
        """A number that all ranks have drawn together, the first one's."""
        own = secrets.randbits(_BITS)
        with ranks_named(local):
            inside = words_of_all(local, [own])[0]
        return words_of_all(site, inside)[0][0]

    def write(self, drawn: int, number: int) -> StoreBoard | None:
        """This rank's name; the others can read it then."""
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
        """All have written theirs: without one that cannot be read the place is none."""
        try:
            if board is None or None in [board.slot(f"rank {n}") for n in range(ranks)]:
                self.store = None
        except BoardGoneError:
            self.store = None

    @property
    def host(self) -> int | None:
        """The rank that the store ends with, if any."""
        return USUAL_HOST if self.store is not None and ends_with_a_site(self.store) else None


def _root_of(store: Store | None) -> Store | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


class Ranks(MeshRanks):
    """The ranks of a mesh, numbered site by site, for the sessions on one of its transports.

    Args:
        numbers: of the ranks of that transport.
        number: of this rank.
        sites: how many there are.
        local: ranks of each.
        comms: all transports of this rank, which end together.
        meeting: of the mesh.
        peers: ranks that take part in the steps of a session on that transport.
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
        """The rank that the place where texts are left ends with, if any."""
        return self._meeting.host

    @property
    def has_place(self) -> bool:
        """Whether there is a place where all can leave texts."""
        return self._meeting.store is not None

    def numbers_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The numbers of ranks of the transport."""
        return tuple(self._numbers[rank] for rank in ranks)

    def place_of(self, number: int) -> tuple[int, int]:
        """The site of a rank, and its local rank."""
        return divmod(number, self._local)

    def words(self, session: int, limit_s: float | None = None) -> LastWords | None:
        """Where texts of a session are left; None where ranks share no store."""
        store = self._meeting.store
        if store is None:
            return None
        return LastWords(store, self.number, self.total, session, limit_s)

    def give_up(
        self, text: str, final: str, enough: Enough, patience_s: float, session: int
    ) -> list[str | None] | None:
        """As `Comm.give_up`, of all ranks, which closes all transports of this one."""
        words = self.words(session)
        if words is not None:
            words.leave(text)
        for comm in self._comms:
            comm.close()
        return None if words is None else words.gather(enough, patience_s, final)


@contextmanager
def ranks_named(comm: Comm) -> Iterator[None]:
    """Gives the errors of a transport of a mesh the numbers of the ranks that are out of reach."""
    try:
        yield
    except ExchangeError as error:
        if comm.mesh is not None and not error.ranks:
            error.ranks = comm.mesh.numbers_of(error.sites)
        raise
