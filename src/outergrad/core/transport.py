"""The protocols between outergrad and a transport: opening it, and its collectives."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence, Set
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from outergrad.core.cost import CostModel
from outergrad.core.sent import Tap
from outergrad.core.sites import Site, sites_of
from outergrad.core.types import Link

Enough = Callable[[Sequence[str | None]], bool]
"""True if these reports suffice to decide; one per site, None where none has come yet."""


class Capability(Enum):
    """Collectives that some methods need and that a transport may lack."""

    ALL_REDUCE = "all_reduce"
    """Sums of dense gradients, so that every method may need them, and of sketches."""
    ALL_TO_ALL = "all_to_all"
    """A different message for every site: for `reduce="two_way"`, and among the ranks of a mesh."""


Sums = Literal["masked", "trusted", "open"]
"""Who sees a site's own part of a sum: nobody, a hub that adds up, or other sites."""


class Work(Protocol):
    """A collective that has been started."""

    def wait(self) -> Any:
        """Blocks until the result is there and returns it."""
        ...


class TwoRounds(Work, Protocol):
    """A sum over the sites, or messages in pieces, in two rounds that have been started."""

    def advance(self) -> None:
        """Starts the second round as soon as the first has come; `wait` does so, too.

        Called for several of them in turn, it lets their second rounds travel at the same time.
        """
        ...


class _InOne:
    """A work of one round where two are possible."""

    def __init__(self, work: Work) -> None:
        self.wait = work.wait

    def advance(self) -> None:
        """Does nothing: there is no second round."""


class Notes(Protocol):
    """Store for the farewells of sites that leave in order.

    It is usable after the connections are closed and while Python shuts down. It must not refer to
    the `Comm`, whose garbage collection also marks the end of a session.
    """

    def leave_at_end(self, text: str, *, of_process: bool) -> None:
        """Leaves this site's farewell, for the end of the session or of its whole process."""
        ...

    def stay(self, sites: Sequence[int]) -> None:
        """Waits for a short time until these sites have read this site's report."""
        ...


class Letter(NamedTuple):
    """A message of one site to another alone.

    Attributes:
        number: what its sender has numbered it with, from 0 on.
        share: a number of the sender's, such as a weight: 0 or more.
        content: bytes, on the host, (n,) uint8.
        ends: whether the sender has nothing more to say in the exchange at hand.
    """

    number: int
    share: float
    content: Tensor
    ends: bool = False


class Lines(Protocol):
    """Lines to some other sites, each in order and by itself: no site waits for a third one."""

    def send(self, site: int, letter: Letter) -> None:
        """Starts to send a letter; one to a site that is gone is dropped."""
        ...

    def next(self, site: int, until: float) -> Letter | None:
        """Returns the next letter of a site; None if none has come until then, or none can.

        A letter that comes later is not lost: the next call returns it.

        Args:
            site: its rank.
            until: by the monotonic clock.
        """
        ...

    def why_closed(self, site: int) -> str:
        """Returns why a site will never send anything more; "" while it may."""
        ...

    def close(self) -> None:
        """Says goodbye to the other sites, after all that was sent."""
        ...


class Board(Protocol):
    """Key-value slots shared by all sites; they remain usable when connections are closed.

    It may be used by several threads, and must not refer to the `Comm`. No call blocks for long:
    one that is not answered in time raises a `BoardGoneError`, and so do all later ones.
    """

    def without_limit(self) -> Board:
        """Returns the same board without a time limit, for a thread that may block."""
        return self

    def within(self, limit_s: float) -> Board:
        """Returns the same board for calls that may take so many seconds, if that is longer."""
        return self

    def first(self, key: str, text: str) -> str:
        """Writes a text if the slot is empty; returns the slot's text after that."""
        ...

    def slot(self, key: str) -> str | None:
        """Returns the text written by `first`; None if the slot is empty."""
        ...

    def put(self, key: str, content: bytes) -> None:
        """Writes bytes into a slot that is still empty."""
        ...

    def get(self, key: str) -> bytes | None:
        """Returns the bytes written by `put`; None if there are none."""
        ...

    def drop(self, key: str) -> None:
        """Frees what this site wrote by `put` and no site reads any more; the default keeps it."""

    def farewell(self, site: int, session: int) -> str | None:
        """Returns a site's farewell of its process or of the session, left by its `Notes`."""
        ...

    def is_gone(self, site: int) -> bool:
        """True if a site is known to write nothing more."""
        return False


class MeshRanks(Protocol):
    """The ranks of a mesh, numbered site by site, for the sessions on one of its transports.

    If some are lost, the reports of all ranks of all sites are gathered.
    """

    number: int
    """Number of this rank."""
    total: int
    """Number of ranks in the mesh."""
    peers: Sequence[int]
    """Numbers of the ranks that take part in the steps of a session on this transport."""
    keys: Sequence[Hashable]
    """Keys of all transports of this rank; they end together."""

    @property
    def host(self) -> int | None:
        """The rank that holds the place of reports, if any: they end together."""
        ...

    @property
    def has_place(self) -> bool:
        """True if there is a place where all ranks can leave reports."""
        ...

    def numbers_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Returns the mesh numbers of ranks of the transport."""
        ...

    def place_of(self, number: int) -> tuple[int, int]:
        """Returns the site of a rank, and its local rank."""
        ...

    def words(self, session: int, limit_s: float | None = None) -> Any:
        """Returns the `Notes` of all ranks; None where they have no place for them."""
        ...

    def give_up(
        self, text: str, final: str, enough: Enough, patience_s: float, session: int
    ) -> list[str | None] | None:
        """Like `Comm.give_up`, with the reports of all ranks, by their numbers."""
        ...


class Comm(Protocol):
    """The collectives that outergrad needs; every site calls them in the same order.

    Members with a default value or body suit a transport without that feature; a derived class
    implements the rest. Where a collective fails because of the other sites, it or its `wait`
    raises an `ExchangeError`.
    """

    rank: int
    world_size: int
    sent_bytes: int
    """Payload bytes that this site has sent since opening, in all collectives but `broadcast`."""
    received_bytes: int
    """Payload bytes that this site has received, counted in the same way."""
    cost: CostModel
    """Cost model of the collectives; `sent_bytes`, `received_bytes` and methods follow it."""
    capabilities: Set[Capability] = frozenset(Capability)
    """Optional collectives that work here; a session refuses a method that needs others."""
    device: torch.device
    """Device of the tensors given to the collectives."""
    key: Hashable
    """Identifies the connections: sessions of this process with an equal key share them, and take
    turns at using them. It is held weakly, so it is an object, no number or tuple."""
    patience_s: float
    """Longest time that a message may take, in seconds."""
    host: int | None = None
    """The site that holds the place of reports (`give_up`, `notes`): they end together."""
    board: Board | None = None
    """Board on which sites agree after a loss; with it, no step has to wait for votes."""
    holds_board: bool = False
    """True if the board ends with this process, which must therefore be the last to end."""
    names: Sequence[str] = ()
    """Names of all sites, in the order of ranks, if they have names."""

    @property
    def sites(self) -> Sequence[Site]:
        """All sites, which know their names, in the order of ranks: for messages to people."""
        return sites_of(self.world_size, tuple(self.names))

    passes_on: bool = False
    """True if `all_gather_in_pieces` works here."""
    way: str = ""
    """How messages travel and who can read them on their way, in words; "" if that is not told."""
    sums: Sums = "open"
    """Who sees this site's part of an `all_reduce`: a ledger of privacy goes by it."""
    epoch: int = 0
    """Number of times that the set of sites has changed."""
    coming: Sequence[int] = ()
    """Ranks of sites that join during training and need the state of training."""
    tap: Tap | None = None
    """Listener that is told of what this site sends; `og.distribute(..., tap=...)` sets it."""
    mesh: MeshRanks | None = None
    """Ranks to gather reports from when some are lost, if this is a transport of a mesh."""
    min_sites: int | None = None
    """Fewest sites with which training continues after a loss; None if any loss ends it for all."""

    def count(self, sent: int = 0, received: int = 0) -> None:
        """Counts bytes that went another way than by a collective, as by the board."""
        self.sent_bytes += sent
        self.received_bytes += received

    def sum_rounds(self, nbytes: int) -> int:
        """Returns the rounds of an `all_reduce` of so many bytes; if 2, it is a `TwoRounds`."""
        return 1

    def all_reduce(self, t: Tensor) -> Work:
        """Sums t over the sites in place; `wait` returns it, equal to the bit on all sites."""
        ...

    def all_gather(self, t: Tensor, sizes: Sequence[int], lane: int = 0) -> Work:
        """Gathers 1-D tensors whose lengths may differ; `wait` returns one per site.

        Args:
            t: this site's, of length `sizes[rank]`.
            sizes: the agreed length on every site.
            lane: messages on different lanes may arrive in any order relative to each other.
        """
        ...

    def all_gather_in_pieces(self, t: Tensor, sizes: Sequence[int], lane: int = 0) -> TwoRounds:
        """Gathers as `all_gather` does, where `passes_on`: sites pass on pieces of all messages.

        So one site may have much more to send than the others. Where they do not, messages go
        directly.
        """
        return _InOne(self.all_gather(t, sizes, lane))

    def take_turn(self, turn: int) -> None:
        """Sets the turn that subsequent messages belong to; called at the same point on every site.

        A turn is the sequence number of a step on the transport. A transport that posts receives
        ahead must not match messages of different turns. Any other transport does nothing.

        Args:
            turn: larger than all previous ones, of which some may be skipped; 0 for messages
                outside any turn.
        """

    def expect(
        self, sizes: Sequence[int], turn: int, dtype: torch.dtype = torch.uint8, lane: int = 0
    ) -> None:
        """Posts the receives of an `all_gather` or `all_to_all` ahead of its start.

        They belong to the next collective of this turn and lane that has no receives yet. A
        transport that sends nothing before the receiver is ready saves a delay so; any other does
        nothing. Before the collective is waited for, nothing times out, and no other site need be
        there.

        Args:
            sizes: as for the collective.
            turn: the current or the next one. If the next one is skipped, its receives never match.
            dtype: of the tensors.
            lane: as for the collective.
        """

    def expect_in_pieces(self, sizes: Sequence[int], turn: int, lane: int = 0) -> None:
        """Posts the receives of an `all_gather_in_pieces` of bytes ahead, as `expect` does."""

    def expect_sum(self, size: int, turn: int, dtype: torch.dtype) -> None:
        """Posts the receive of the next `all_reduce` ahead, in a transport that needs one for it.

        Args:
            size: number of elements of the tensor.
            turn: the current or the next one.
            dtype: of the tensor.
        """

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Work:
        """Sends every site its own 1-D tensor; `wait` returns the tensors received.

        Args:
            parts: in the order of sites; the part of this site stays here.
            sizes: the agreed length of each site's part for this one.
        """
        ...

    has_lines: bool = False
    """True if `exchange_with` works here."""

    def exchange_with(self, sites: Sequence[int], number: int, most_bytes: int) -> Lines:
        """Opens lines to some other sites alone: no other site takes part, nor is waited for.

        Both ends of a line open it, at the same point of the program.

        Args:
            sites: the neighbours' ranks.
            number: of the lines, as a session's; no earlier ones of the transport have it.
            most_bytes: largest content of a letter; a longer one closes its line.

        Raises:
            RuntimeError: the transport has no lines.
        """
        raise RuntimeError(f"{type(self).__name__} has no lines between pairs of sites")

    def broadcast(self, t: Tensor) -> None:
        """Overwrites t with rank 0's."""
        ...

    def control(self, values: Sequence[int]) -> Tensor:
        """Returns an int64 tensor, on a device where a collective does not stop the accelerator."""
        return torch.tensor(values, dtype=torch.int64)

    def settle_pace(self, link: Link, timeout_s: float) -> None:
        """Stores the measured link, equal on all sites; the default does nothing.

        Args:
            link: of the slowest site, as a rough bound: it may be nearer and faster.
            timeout_s: the shortest `patience_s`.
        """

    def all_began(self) -> None:
        """Marks the end of an exchange between two steps; the default does nothing.

        No site began that exchange before it had received all earlier messages.
        """

    def why_gone(self, site: int) -> str:
        """Returns why a site has gone, as far as the transport was told; "" if it was not."""
        return ""

    def took_part(self, session: int, first: int, last: int) -> None:
        """Notes that this site has all messages of some steps; the default does nothing.

        Args:
            session: fingerprint of the steps' session.
            first: of the steps.
            last: of the steps, inclusive.
        """

    def notes(self, session: int) -> Notes | None:
        """Returns the store for farewells; None where there is none.

        Args:
            session: fingerprint of the session concerned.
        """
        return None

    def give_up(
        self, text: str, final: str, enough: Enough, patience_s: float, session: int = 0
    ) -> list[str | None] | None:
        """Leaves a failure report for the other sites and closes the connections, for good.

        Args:
            text: this site's report.
            final: the report that replaces it when `patience_s` is over.
            enough: decides whether the reports so far suffice.
            patience_s: longest time to wait for that, in seconds.
            session: fingerprint of the session that failed.

        Returns:
            The report of every site, None for sites without one; or None if the place where reports
            are left is gone.
        """
        ...

    def close(self) -> None:
        """Closes the connections: the other sites learn at once that this one is gone."""
        ...

    def sealed(self) -> Comm:
        """Returns a transport with end-to-end encryption between the same sites; called on all.

        Raises:
            ExchangeError: the sites cannot agree on keys.
        """
        return self

    def go_on(self, sites: Sequence[int], coming: Sequence[str] = ()) -> Callable[[], Comm]:
        """Starts to connect to the given sites only, after others were lost; needs `min_sites`.

        Args:
            sites: ranks, this site's included; their indices in this sequence are the new ranks.
            coming: names of sites that join, with the ranks behind them.

        Returns:
            A function that waits until all sites are connected, and opens the transport for one
            session. It raises a `RuntimeError` if that is impossible.
        """
        raise RuntimeError(f"{type(self).__name__} reaches the same sites for ever")


class Transport(Protocol):
    """A way to connect the sites: an argument of `distribute`."""

    settings: Set[str] = frozenset()
    """Names of the arguments among `group` and `timeout` of `distribute` that it uses."""

    def open(self, device: torch.device, *_: Any, **settings: Any) -> Comm:
        """Opens the transport for one session or another user of its collectives.

        Args:
            device: of the tensors that will be sent.
            **settings: the given ones of its `settings`.

        Raises:
            ValueError: a setting is invalid.
            RuntimeError: there are no sites to connect to.
        """
        ...
