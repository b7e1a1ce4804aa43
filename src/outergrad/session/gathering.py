"""Gatherings for an exchange with a quorum: one decision on the board says who takes part."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outergrad.core.errors import ExchangeError, Failure
from outergrad.core.sites import called
from outergrad.core.transport import Board, Comm

_POLL_S = 0.05
_WORDS = 3
"""Numbers in what a site says of itself."""


@dataclass(frozen=True, kw_only=True)
class Presence:
    """Words of a site that has come to an exchange.

    Attributes:
        weight: how much it counts.
        shares: True if it has a change to share; else it counts with none.
        waits_for_all: True if it has no more steps to make before all are equal: then it does not
            go ahead without the others.
    """

    weight: int
    shares: bool = True
    waits_for_all: bool = False

    def words(self) -> list[int]:
        """Returns it as numbers."""
        return [self.weight, int(self.shares), int(self.waits_for_all)]

    @staticmethod
    def of(words: object) -> Presence:
        """Reads what another site said.

        Raises:
            ExchangeError: it cannot be read.
        """
        if not isinstance(words, list) or len(words) != _WORDS:
            raise _unreadable()
        if not all(type(number) is int and number >= 0 for number in words):
            raise _unreadable()
        weight, shares, waits_for_all = words
        return Presence(weight=weight, shares=bool(shares), waits_for_all=bool(waits_for_all))


@dataclass(frozen=True, kw_only=True)
class Roll:
    """Decision on an exchange, the same on all sites: who takes part.

    Attributes:
        there: the sites that take part, by rank.
        sites: number of all sites.
    """

    there: Mapping[int, Presence]
    sites: int

    @property
    def of_all(self) -> bool:
        """True if all sites take part."""
        return len(self.there) == self.sites

    @property
    def ends(self) -> bool:
        """True if all sites are there, and none comes from its training loop."""
        return self.of_all and all(one.waits_for_all for one in self.there.values())

    @property
    def weight(self) -> int:
        """Sum of the weights; 0 if there is nothing to exchange."""
        found = self.there.values()
        return sum(one.weight for one in found) if any(one.shares for one in found) else 0

    def text(self) -> str:
        """Returns the decision as a text for a slot."""
        return json.dumps({rank: self.there[rank].words() for rank in sorted(self.there)})

    @staticmethod
    def of(text: str, sites: int) -> Roll:
        """Reads a decision from the board.

        Raises:
            ExchangeError: it cannot be read.
        """
        found = _parsed(text)
        ranks = {str(rank): rank for rank in range(sites)}
        if not isinstance(found, dict) or not found or found.keys() - ranks.keys():
            raise _unreadable()
        there = {ranks[rank]: Presence.of(words) for rank, words in found.items()}
        return Roll(there=there, sites=sites)


class Gathering:
    """The sites' gatherings, one per exchange: they say that they are there, and one decides.

    A site writes into a slot of its own that it is there, and with which weight. Once a quorum is
    there, it waits for the others until its own clock says that the grace is over. Then it writes
    who takes part. That slot is written once, so the first decision stands for all sites, and no
    other clock matters.

    Args:
        comm: the transport, which has a board.
        session: fingerprint of the session.
        name: beginning of the names of its slots, which no others have.
        least: least number of sites that go ahead.
        grace_s: seconds that these wait for the others.
        look: called while this site waits; raises if the others gave up.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        comm: Comm,
        session: int,
        name: str,
        least: int,
        grace_s: float,
        look: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert comm.board is not None
        self._board = comm.board.within(comm.patience_s)
        self._comm, self._session, self._name = comm, session, name
        self._least, self._grace_s, self._look, self._clock = least, grace_s, look, clock

    @property
    def board(self) -> Board:
        """Board on which the sites gather."""
        return self._board

    def slot(self, what: str, number: int) -> str:
        """Returns the name of a slot of an exchange."""
        return f"{self._name} {what} {number}"

    def is_open(self, number: int) -> bool:
        """True if another site has come to an exchange from its training loop."""
        return self._board.slot(self.slot("open", number)) is not None

    def decided(self, number: int) -> Roll | None:
        """Returns the decision on an exchange; None before there is one."""
        text = self._board.slot(self.slot("takes part", number))
        return None if text is None else self._roll(text)

    def _roll(self, text: str) -> Roll:
        """Reads a decision; raises if it is of fewer sites than a quorum: no site makes it."""
        roll = Roll.of(text, self._comm.world_size)
        if len(roll.there) < self._least:
            raise ExchangeError(f"{len(roll.there)} sites decided, where {self._least} may")
        return roll

    def attend(self, number: int, own: Presence) -> Roll:
        """Says that this site is there, and waits until it is decided who takes part.

        Args:
            number: of the exchange.
            own: what this site says of itself.

        Raises:
            ExchangeError: there is no quorum in time, or too few sites are left.
        """
        self._say(number, own)
        waits_for_all = own.waits_for_all
        there, began, since = dict[int, Presence](), self._clock(), None
        while (roll := self.decided(number)) is None:
            self._look()
            there |= self._there(number, self._missing(there))
            missing, now = self._missing(there), self._clock()
            late = self._still_coming(number, missing, waits_for_all=waits_for_all)
            if since is None and len(there) >= self._least:
                since = now
            waited = since is not None and not waits_for_all and now - since >= self._grace_s
            if waited or (not late and len(there) >= self._least):
                return self._decide(number, there)
            if now - began > self._comm.patience_s:
                raise self._missed(missing, now - began)
            time.sleep(_POLL_S)
        return roll

    def _still_coming(self, number: int, missing: list[int], *, waits_for_all: bool) -> list[int]:
        """Returns those of the missing sites whose sessions have not ended.

        Raises:
            ExchangeError: too few are left.
        """
        ended = [one for one in missing if self._has_ended(one)]
        too_few = waits_for_all or self._comm.world_size - len(ended) < self._least
        # Once it is decided a site may leave at once: only before that it has left too early.
        if ended and too_few and self.decided(number) is None:
            who = called([self._comm.sites[rank] for rank in ended])
            raise ExchangeError(f"{who} left before this exchange", ended, kind=Failure.CLOSED)
        return [rank for rank in missing if rank not in ended]

    def _has_ended(self, rank: int) -> bool:
        is_gone = self._board.is_gone(rank)
        return is_gone or self._board.farewell(rank, self._session) is not None

    def _say(self, number: int, own: Presence) -> None:
        slot = self.slot(f"there {self._comm.rank}", number)
        self._board.first(slot, json.dumps(own.words()))
        if not own.waits_for_all:
            self._board.first(self.slot("open", number), str(self._comm.rank))

    def _there(self, number: int, ranks: list[int]) -> dict[int, Presence]:
        """Returns what those of some sites that are there have said."""
        texts = {rank: self._board.slot(self.slot(f"there {rank}", number)) for rank in ranks}
        said = {rank: text for rank, text in texts.items() if text is not None}
        return {rank: Presence.of(_parsed(text)) for rank, text in said.items()}

    def _missing(self, there: Mapping[int, object]) -> list[int]:
        return [rank for rank in range(self._comm.world_size) if rank not in there]

    def _decide(self, number: int, there: Mapping[int, Presence]) -> Roll:
        text = Roll(there=there, sites=self._comm.world_size).text()
        return self._roll(self._board.first(self.slot("takes part", number), text))

    def _missed(self, missing: list[int], waited_s: float) -> ExchangeError:
        who = called([self._comm.sites[rank] for rank in missing])
        told = f"{who} did not come within {waited_s:.0f} s"
        error = ExchangeError(told, missing, kind=Failure.TIMEOUT)
        error.waited_s = waited_s
        return error


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _unreadable() from None


def _unreadable() -> ExchangeError:
    return ExchangeError("what stands on the board about an exchange cannot be read")
