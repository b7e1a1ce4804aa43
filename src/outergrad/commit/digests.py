"""The final barrier: all sites have made the last step, and tell what they have received in it.

What goes over the board is a generator that yields requests, as in `agreement.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress

from outergrad.comm.failure_report import FailureReport
from outergrad.commit.agreement import TROUBLE
from outergrad.commit.board_requests import Asking, Farewell, First, Get, Gone, Put, Rest, Slot
from outergrad.commit.peer_requests import ALL, MADE, Question, asking
from outergrad.core.errors import BoardGoneError, ExchangeError, Failure

_READ = "read"
_SOON_S = 0.05
"""Seconds until the others are asked: sites that end together need not be."""


class Digests:
    """Digests of all sites, after the same number of steps.

    Each site writes its own digests to the board, reads those of the others, and then writes that
    it has read them. The loop does so in its final barrier, and the watcher when another site asks.
    So all have read them before the first site ends, which may end the board.

    Args:
        rank: rank of this site.
        sites: number of sites.
        made: number of steps that this site has made.
        own: digest of what it received in the last of them, by session.

    Attributes:
        made: number of steps, as above.
    """

    def __init__(self, rank: int, sites: int, made: int, own: Mapping[int, int]) -> None:
        self._rank, self._sites, self.made = rank, sites, made
        self._found = {rank: own}
        self._is_told = False

    @property
    def missing(self) -> list[int]:
        """Sites that are not known to have made the steps."""
        return [site for site in range(self._sites) if site not in self._found]

    def tell(self) -> Asking[None]:
        """Publishes that this site has made the steps, with its digests."""
        if not self._is_told:
            yield from tell_made(self._rank, self.made, self._found[self._rank])
            self._is_told = True

    def look(self) -> Asking[None]:
        """Reads what the others have published so far."""
        for site in self.missing:
            if (told := (yield Get(_made_key(site, self.made)))) is not None:
                self.take(site, _digests(told))

    def take(self, site: int, digests: Mapping[int, int]) -> None:
        """Records the digests of a site, by session."""
        self._found[site] = digests

    def take_farewells(self) -> Asking[None]:
        """Reads the digests of sites that have ended in order, after as many steps."""
        for site in self.missing:
            if (word := (yield from farewell_of(site, self.made))) is not None:
                self.take(site, word.digests)

    def say_read(self) -> Asking[None]:
        """Publishes that this site has read the digests of all."""
        yield First(_read_slot(self._rank, self.made), _READ)

    def is_read_by(self, site: int) -> Asking[bool]:
        """True if a site has published that it has read the digests of all."""
        return (yield Slot(_read_slot(site, self.made))) is not None

    def of(self, session: int) -> dict[int, int | None]:
        """Returns the digests of a session by site; None for a site that published none."""
        return {site: digests.get(session) for site, digests in sorted(self._found.items())}


def tell_made(site: int, made: int, digests: Mapping[int, int]) -> Asking[None]:
    """Publishes that a site has made `made` steps, with the digest of each session's last ones."""
    told = json.dumps({str(session): digest for session, digest in digests.items()})
    yield Put(_made_key(site, made), told.encode())


def _digests(told: bytes) -> dict[int, int]:
    """Parses published digests; empty if they cannot be read."""
    try:
        return {int(session): int(digest) for session, digest in json.loads(told).items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def _made_key(site: int, made: int) -> str:
    return f"made {made} {site}"


def _read_slot(site: int, made: int) -> str:
    return f"read {made} {site}"


class AllHaveMade:
    """Waits until all sites have made as many steps as this one.

    Args:
        digests: what each site received in its last steps, as far as this one knows.
        rank: rank of this site.
        sites: number of sites.
        asked: number of requests of other sites that this one has read.
        clock: returns the time in seconds.
    """

    def __init__(
        self, digests: Digests, rank: int, sites: int, asked: int, clock: Callable[[], float]
    ) -> None:
        self._digests, self._rank, self._asked, self._clock = digests, rank, asked, clock
        self._others = [site for site in range(sites) if site != rank]

    def passed(self, limit_s: float, stays_s: float | None) -> Asking[None]:
        """Waits for all sites.

        Args:
            limit_s: seconds that this may take.
            stays_s: seconds that this site, if it holds the board, then waits until the others
                have read; None if it does not hold it.

        Raises:
            ExchangeError: some site has not made the steps.
            BoardGoneError: the board is gone, before all of this was known.
        """
        digests, began, is_asked = self._digests, self._clock(), False
        if digests.missing:
            yield from digests.tell()
        while digests.missing:
            waited_s = self._clock() - began  # before looking: the process may be suspended
            gone = set[int]()
            for site in digests.missing:
                if (yield Gone(site)):
                    gone.add(site)
            yield from digests.look()
            yield from digests.take_farewells()
            if late := gone.intersection(digests.missing):
                raise ExchangeError(Failure.CLOSED.value, sorted(late), kind=Failure.CLOSED)
            if digests.missing and waited_s > limit_s:
                raise ExchangeError(Failure.TIMEOUT.value, digests.missing, kind=Failure.TIMEOUT)
            if digests.missing and waited_s > _SOON_S and not is_asked:
                question = Question(self._rank, ALL, digests.made, MADE)
                yield from asking(question, self._asked)
                is_asked = True
            if digests.missing:
                if (yield Slot(TROUBLE)) is not None:
                    raise ExchangeError("the other sites gave up", kind=Failure.CLOSED)
                yield Rest(self._clock() + _SOON_S)
        with suppress(BoardGoneError):  # all is known by now
            yield from digests.say_read()
            if stays_s is not None:
                yield from self._stay(stays_s)

    def _stay(self, limit_s: float) -> Asking[None]:
        """Waits until the others have read, because the board may end when this site goes on."""
        until = self._clock() + limit_s
        for site in self._others:
            while not (yield from self._digests.is_read_by(site)) and self._clock() < until:
                if (yield Slot(TROUBLE)) is not None:
                    return
                yield Rest(until)


def farewell_of(site: int, made: int) -> Asking[FailureReport | None]:
    """Returns the farewell of a site that ended in order, after as many steps as this one."""
    try:
        text = yield Farewell(site)
    except BoardGoneError:
        return None
    word = None if text is None else FailureReport.of(text)
    in_order = word is not None and word.made == made and word.ended == "session"
    return word if in_order else None
