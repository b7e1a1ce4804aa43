"""The protocols between outergrad and a transport: how it is opened, and its collectives."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence, Set
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from outergrad.core.cost import CostModel
from outergrad.core.types import Link

Enough = Callable[[Sequence[str | None]], bool]
"""Whether what sites have left is enough to go by; None of those that have left nothing yet."""


class Capability(Enum):
    """What methods ask of a transport besides what every one can do."""

    ALL_REDUCE = "all_reduce"
    """Sums: of gradients that travel dense, so that every method may need them, and of sketches."""
    ALL_TO_ALL = "all_to_all"
    """Something else for every site: for `reduce="two_way"`, and among the ranks of a mesh."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Blocks until the result is there and returns it."""
        ...


class Notes(Protocol):
    """A place where a site that leaves in order leaves a text for the others.

    It may be used after the connections are closed, and when Python is about to end, and must not
    refer to the `Comm`: that this is forgotten tells of the end of a session, too.
    """

    def leave_at_end(self, text: str, *, of_process: bool) -> None:
        """This site's, when it ends the session, or its whole process."""
        ...

    def stay(self, sites: Sequence[int]) -> None:
        """Waits, not for long, until these sites have read what was left."""
        ...


class Board(Protocol):
    """Slots that all sites can write to and read, also where their connections are closed.

    It may be used by several threads, and must not refer to the `Comm`. Nothing of it blocks for
    long: what is not answered in time raises a `BoardGoneError`, then and ever after.
    """

    def without_limit(self) -> Board:
        """The same slots for a thread that may wait for as long as an answer takes."""
        return self

    def first(self, key: str, text: str) -> str:
        """Writes a text into a slot, unless one stands there; returns what stands there then."""
        ...

    def slot(self, key: str) -> str | None:
        """What was written so; None if nothing was."""
        ...

    def put(self, key: str, content: bytes) -> None:
        """Writes any content into a slot where nothing stands yet."""
        ...

    def get(self, key: str) -> bytes | None:
        """What was put there; None if nothing was."""
        ...

    def farewell(self, site: int, session: int) -> str | None:
        """What a site has left by its `Notes`, of its end or that of the session."""
        ...

    def is_gone(self, site: int) -> bool:
        """Whether a site is known to write nothing more."""
        return False


class MeshRanks(Protocol):
    """The ranks of a mesh, for the sessions on one of its transports.

    They are numbered site by site. If some are lost, all ranks of all sites tell each other.
    """

    number: int
    """Of this rank."""
    total: int
    """How many ranks there are."""
    peers: Sequence[int]
    """Those that take part in the steps of a session on this transport."""
    keys: Sequence[Hashable]
    """Of all transports of this rank, which end together."""

    @property
    def host(self) -> int | None:
        """The rank that the place where texts are left ends with, if any."""
        ...

    @property
    def has_place(self) -> bool:
        """Whether there is a place where all can leave texts."""
        ...

    def numbers_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The numbers of ranks of the transport."""
        ...

    def place_of(self, number: int) -> tuple[int, int]:
        """The site of a rank, and its local rank."""
        ...

    def words(self, session: int, limit_s: float | None = None) -> Any:
        """The `Notes` of all ranks; None where they have no place for them."""
        ...

    def give_up(
        self, text: str, final: str, enough: Enough, patience_s: float, session: int
    ) -> list[str | None] | None:
        """As `Comm.give_up`, with the texts of all ranks, by their numbers."""
        ...


class Comm(Protocol):
    """The few collectives that outergrad needs; every site calls them in the same order.

    What stands here with a value, or needs none, is right for a transport that has nothing of the
    kind: a class that derives from this one writes the rest. Where a collective fails because of
    the other sites, it or its `wait` raises an `ExchangeError`.
    """

    rank: int
    world_size: int
    sent_bytes: int
    """Payload that this site has sent since it was opened, by the collectives but `broadcast`."""
    received_bytes: int
    """The same of what it has received."""
    cost: CostModel
    """What the collectives cost: `sent_bytes` and `received_bytes` go by it, and so do methods."""
    capabilities: Set[Capability] = frozenset(Capability)
    """Those of its methods that do something; a session refuses a method that needs others."""
    device: torch.device
    """Of what is given to the collectives."""
    key: Hashable
    """The same for all sessions of this process that use the same connections, and so take turns.
    It is referred to weakly: an object, no number or tuple."""
    patience_s: float
    """How long a message may take."""
    host: int | None = None
    """The site with which the place ends where sites leave texts (`give_up`, `notes`), if any."""
    board: Board | None = None
    """Where sites that lost others agree on what counts, and no step has to wait for votes."""
    holds_board: bool = False
    """Whether the board ends with this process: then it goes last."""
    names: Sequence[str] = ()
    """Of all sites, in the order of ranks, where they have some."""
    epoch: int = 0
    """How many times sites have gone on without others, or with more."""
    coming: Sequence[int] = ()
    """Sites that have come while the others train, and have to be told how far these are."""
    mesh: MeshRanks | None = None
    """Who tell each other when some are lost, where this is a transport of a mesh's."""
    min_sites: int | None = None
    """How many have to be left to go on without others; None where a lost site ends it for all."""

    def all_reduce(self, t: Tensor) -> Work:
        """Sums t over the sites in place; `wait` returns it, on all sites the same to the bit."""
        ...

    def all_gather(self, t: Tensor, sizes: Sequence[int], lane: int = 0) -> Work:
        """Gathers 1-D tensors whose lengths may differ; `wait` returns one per site.

        Args:
            t: this site's, of length `sizes[rank]`.
            sizes: the agreed length on every site.
            lane: messages of one lane need not come in order with those of another.
        """
        ...

    def take_turn(self, turn: int) -> None:
        """Messages belong to this turn from now on; called in the same place on every site.

        A turn is the sequence number of a step on the transport. A transport that receives ahead
        must not take a message of one turn for one of another. Any other transport does nothing.

        Args:
            turn: above all that were taken before, of which some may be left out; 0 for messages
                that belong to none.
        """

    def expect(
        self, sizes: Sequence[int], turn: int, dtype: torch.dtype = torch.uint8, lane: int = 0
    ) -> None:
        """Posts the receives of an `all_gather` or `all_to_all` before that is started.

        It is the next one of this turn and lane that is not expected yet. A transport that sends
        nothing before the other side receives saves a delay so; any other does nothing. Until the
        collective is waited for, nothing times out, and no other site need be there.

        Args:
            sizes: as for the collective.
            turn: this one or the next. If the next one is left out, its messages never come.
            dtype: of the tensors.
            lane: as for the collective.
        """

    def expect_sum(self, size: int, turn: int, dtype: torch.dtype) -> None:
        """The same of the next `all_reduce`, in a transport that receives something for it.

        Args:
            size: of the tensor.
            turn: this one or the next.
            dtype: of it.
        """

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Work:
        """Sends every site a 1-D tensor of its own; `wait` returns what each had for this one.

        Args:
            parts: in the order of sites; what is for this one stays here.
            sizes: the agreed length of what each site has for this one.
        """
        ...

    def broadcast(self, t: Tensor) -> None:
        """Overwrites t with rank 0's."""
        ...

    def control(self, values: Sequence[int]) -> Tensor:
        """An int64 tensor for a collective that should not disturb the device."""
        return torch.tensor(values, dtype=torch.int64)

    def settle_pace(self, link: Link, timeout_s: float) -> None:
        """Takes note of what was measured, the same on all sites; it may do nothing.

        Args:
            link: of the slowest site, roughly: it may be less far, and faster.
            timeout_s: the shortest `patience_s`.
        """

    def all_began(self) -> None:
        """Takes note of the end of an exchange between two steps; it may do nothing.

        Nobody began it before it had all that was sent to it before.
        """

    def took_part(self, session: int, first: int, last: int) -> None:
        """Takes note that this site has all messages of some steps; it may do nothing.

        Args:
            session: fingerprint of the one whose steps they are.
            first: of the steps.
            last: of them, included.
        """

    def notes(self, session: int) -> Notes | None:
        """Where a site that leaves in order tells the others; None where there is no such place.

        Args:
            session: fingerprint of the one that it is about.
        """
        return None

    def give_up(
        self, text: str, final: str, enough: Enough, patience_s: float, session: int = 0
    ) -> list[str | None] | None:
        """Leaves a text for the other sites and closes the connections, for good.

        Args:
            text: this site's.
            final: what it leaves in place of this when its patience ends.
            enough: whether the texts that are there are enough to go by.
            patience_s: how long to wait for that.
            session: fingerprint of the one that failed.

        Returns:
            What every site has left, None for those that have left nothing; or None if the place
            is gone where they leave it.
        """
        ...

    def close(self) -> None:
        """Closes the connections: the other sites hear at once that this one is gone."""
        ...

    def sealed(self) -> Comm:
        """The same sites, where nobody between them reads what is sent; called on all at once.

        Raises:
            ExchangeError: they cannot agree on keys.
        """
        return self

    def go_on(self, sites: Sequence[int], coming: Sequence[str] = ()) -> Callable[[], Comm]:
        """Begins to reach these sites alone, after others were lost; where `min_sites` is set.

        Args:
            sites: ranks, of which this site's is one; the new ranks are the places among them.
            coming: names of sites that take part besides, behind them.

        Returns:
            What waits until they are there, and opens that for one session. It raises a
            `RuntimeError` where that cannot be.
        """
        raise RuntimeError(f"{type(self).__name__} reaches the same sites for ever")


class Transport(Protocol):
    """How sites reach each other: what a user passes to `distribute`."""

    settings: Set[str] = frozenset()
    """Which of the arguments `group` and `timeout` of `distribute` it goes by."""

    def open(self, device: torch.device, *_: Any, **settings: Any) -> Comm:
        """Opens it for one session, or whoever else has something to send.

        Args:
            device: of the tensors that will be sent.
            **settings: those of its `settings` that were given.

        Raises:
            ValueError: a setting cannot be.
            RuntimeError: there are no sites to reach.
        """
        ...
