"""What a site and its watcher know of the steps that sites make together, and what they promise.

A step is made once it is counted here: then the others can have from this site what it brought. A
site that gives up, or hears that others do, is frozen: it makes no more steps but what all agree
on (`agreement.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, SupportsInt
from weakref import ref

from outergrad.comm.standing import Standing
from outergrad.core.errors import BoardGoneError, ExchangeError, Failure
from outergrad.core.transport import Board, Comm
from outergrad.step.agreement import TROUBLE, Agreement, Outcome
from outergrad.step.board_requests import Farewell, First, Get, Gone, Put, Request, Rest, Slot
from outergrad.step.brought import Brought
from outergrad.step.digests import Digests
from outergrad.step.turning import Turning

MOST_SESSIONS = 64
"""Of the latest ones something is told to other sites."""
_POLL_S = 0.02


class Kept(Protocol):
    """A step that another site may still ask about."""

    @property
    def waits_s(self) -> float:
        """For how long this site has been waiting for what it waits for now."""
        ...

    def brought(self) -> Brought | None:
        """What came of it, again; None if that cannot be had any more."""
        ...

    def message_to(self, site: int, place: int) -> bytes | None:
        """What this site sent in it; None if that cannot be had any more."""
        ...


@dataclass
class _Step:
    """One that is made, or under way.

    Attributes:
        applied: whether it counts.
        kept: what is left of it; None where whoever lacks it needs no more than `applied`.
    """

    applied: bool
    kept: ref[Any] | None

    def content(self) -> bytes | None:
        """What it brought, if that is still known."""
        if self.kept is None:
            return Brought(self.applied).packed()
        step = self.kept()
        brought = None if step is None else step.brought()
        return None if brought is None else brought.packed()


class Pact(Turning):
    """Of one site with the others of a transport.

    Attributes:
        made: how many steps have come to their end, those of all sessions.
        frozen: whether this site makes no more.
        session: the one whose step came to its end last.
        asked: questions of other sites that were read.
        digests: by session, of what came in its last steps; only of those that nobody voted on.
    """

    def __init__(self) -> None:
        self.made, self.frozen, self.session, self.asked = 0, False, 0, 0
        self.digests: dict[int, SupportsInt] = {}
        self._of_all: Digests | None = None
        self._sent = False
        self._last: _Step | None = None
        self._current: ref[Any] | None = None
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._outcome: Outcome | None = None
        super().__init__()

    # -- what the loop tells --------------------------------------------------------------------

    def begins(self, step: Kept) -> None:
        """A step is under way."""
        self._current = ref(step)

    def sends(self) -> None:
        """This site is about to send what makes another one able to make the step.

        Raises:
            ExchangeError: it has promised not to.
        """
        with self._lock:
            self._refuse_frozen()
            self._sent = True

    def makes(
        self, session: int, step: Kept | None, *, applied: bool, digest: SupportsInt | None = None
    ) -> None:
        """A step comes to its end here.

        Args:
            session: whose.
            step: what is kept; None where all that could lack it have all but the decision.
            applied: whether it counts.
            digest: of what came in it, where nobody voted on it.

        Raises:
            ExchangeError: it must not, without the others.
        """
        with self._lock:
            self._refuse_frozen()
            self.made, self._sent, self.session = self.made + 1, False, session
            self._last = _Step(applied, None if step is None else ref(step))
            if digest is not None:
                self._note_digest(session, digest)

    def _note_digest(self, session: int, digest: SupportsInt) -> None:
        self.digests.pop(session, None)
        if len(self.digests) == MOST_SESSIONS:
            del self.digests[next(iter(self.digests))]
        self.digests[session] = digest

    # -- what the watcher answers ---------------------------------------------------------------

    @property
    def told(self) -> dict[int, int]:
        """The digests, as other sites are told of them."""
        with self._lock:
            return {session: int(digest) for session, digest in self.digests.items()}

    def digests_of_all(self, comm: Comm) -> Digests:
        """What is known of what all sites have received, in as many steps as this one has made."""
        with self._lock:
            if self._of_all is None or self._of_all.made != self.made:
                own = comm.rank, comm.world_size, self.made
                self._of_all = Digests(*own, self.told)
            return self._of_all

    def message_to(self, site: int, made: int, place: int) -> bytes | None:
        """What this site sent in the step after so many, if it is known."""
        with self._lock:
            last = None if self._last is None else self._last.kept
            found = {self.made: self._current, self.made - 1: last}.get(made)
        step = None if found is None else found()
        return None if step is None else step.message_to(site, place)

    # -- when others are lost -------------------------------------------------------------------

    def agree(self, comm: Comm, standing: Standing) -> Outcome:
        """Freezes this site, unless it is, and goes by what all agree on.

        Args:
            comm: the transport, which has a board.
            standing: how far this site is, but for what is known here.
        """
        with self._lock:
            is_first, self.frozen = not self.frozen, True
            waited_s = max(standing.waited_s, self._waits_s)
            word = replace(standing, made=self.made, sent=self._sent, waited_s=waited_s)
        if not is_first:
            self._ended.wait()
            assert self._outcome is not None
            return self._outcome
        assert comm.board is not None
        own = comm.rank, comm.world_size, comm.host, comm.patience_s
        how = self._content, time.monotonic, comm.close, comm.min_sites
        try:
            self._outcome = _gone_through(Agreement(*own, word, *how), comm.board, word.session)
            self._begin_to_go_on(comm)
        finally:
            self._ended.set()
        return self._outcome

    @property
    def _waits_s(self) -> float:
        step = None if self._current is None else self._current()
        return 0.0 if step is None else step.waits_s

    def _content(self, made: int) -> bytes | None:
        if made != self.made or self._last is None:
            return None
        try:
            return self._last.content()
        except RuntimeError:  # nobody can have it of this site: others may
            return None


def _gone_through(agreement: Agreement, board: Board, session: int) -> Outcome:
    """Asks the board what an agreement asks."""
    asking = agreement.reach()
    try:
        request = next(asking)
        while True:
            try:
                answer = _answer(board, request, session)
            except BoardGoneError as error:
                request = asking.throw(error)
            else:
                request = asking.send(answer)
    except StopIteration as end:
        return end.value


def _answer(board: Board, request: Request, session: int) -> Any:
    answers: dict[type, Callable[[Any], Any]] = {
        First: lambda one: board.first(one.key, one.text),
        Slot: lambda one: board.slot(one.key),
        Put: lambda one: board.put(one.key, one.content),
        Get: lambda one: board.get(one.key),
        Farewell: lambda one: board.farewell(one.site, session),
        Gone: lambda one: board.is_gone(one.site),
        Rest: lambda one: time.sleep(_POLL_S),
    }
    return answers[type(request)](request)


def refuse_if_given_up(comm: Comm, began: float) -> None:
    """A site that stood still looks whether the others went on without it.

    Args:
        comm: the transport.
        began: when its step did, by the monotonic clock.

    Raises:
        ExchangeError: they did.
    """
    if comm.board is None or time.monotonic() - began < comm.patience_s / 2:
        return
    with suppress(BoardGoneError):
        if is_in_trouble(comm.board):
            raise ExchangeError("the other sites gave up", kind=Failure.CLOSED)


def is_in_trouble(board: Board) -> bool:
    """Whether some site has given up."""
    return board.slot(TROUBLE) is not None
