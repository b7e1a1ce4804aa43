"""State of this site's commits, shared by loop and watcher, and its promises to others.

A step is made once it is counted here: from then on the others can have its result from this site.
A site that aborts, or learns that others do, is frozen: it makes no more steps except those that
all agree on (`agreement.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, SupportsInt
from weakref import ref

from outergrad.comm.failure_report import FailureReport
from outergrad.commit.agreement import TROUBLE, Agreement, Outcome
from outergrad.commit.board_requests import Farewell, First, Get, Gone, Put, Request, Rest, Slot
from outergrad.commit.digests import Digests
from outergrad.commit.lost import Findings
from outergrad.commit.membership_record import GOING_ON, MembershipRecord
from outergrad.commit.step_result import StepResult
from outergrad.core.errors import BoardGoneError, ExchangeError, Failure
from outergrad.core.transport import Board, Comm

MOST_SESSIONS = 64
"""Number of sessions, the latest ones, of which other sites are told."""
_POLL_S = 0.02


class Kept(Protocol):
    """A step that another site may still ask about."""

    @property
    def waits_s(self) -> float:
        """Seconds since the current wait of this site began; 0 outside of waits."""
        ...

    def brought(self) -> StepResult | None:
        """Returns the result of the step once more; None if it is no longer there."""
        ...

    def message_to(self, site: int, place: int) -> bytes | None:
        """Returns the bytes that this site sent in a message; None if they are no longer there."""
        ...


@dataclass
class _Step:
    """The last step that was made.

    Attributes:
        applied: whether it counts.
        kept: weak reference to the step; None if a site that lacks it needs only `applied`.
    """

    applied: bool
    kept: ref[Any] | None

    def content(self) -> bytes | None:
        """Returns the packed result of the step; None if it is no longer there."""
        if self.kept is None:
            return StepResult(self.applied).packed()
        step = self.kept()
        brought = None if step is None else step.brought()
        return None if brought is None else brought.packed()


class CommitParticipant:
    """Commit participant: one site among the sites of a transport.

    Attributes:
        made: number of steps that have ended, of all sessions.
        frozen: whether this site makes no more steps.
        session: fingerprint of the session whose step ended last.
        asked: number of requests of other sites that were read.
        digests: digest, by session, of its last steps; only of those that nobody voted on.
        opens: opens the transport of the sites that go on, once that is agreed.
        coming: names of the sites that are going to join.
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
        self.opens: Callable[[], Comm] | None = None
        self.coming: Sequence[str] = ()
        self._pauses_at: int | None = None
        self._turns_at: int | None = None

    # -- called by the loop ---------------------------------------------------------------------

    def begins(self, step: Kept) -> None:
        """Records the step that is under way."""
        self._current = ref(step)

    def sends(self) -> None:
        """Records that this site is about to send what enables another one to make the step.

        Raises:
            ExchangeError: this site is frozen.
        """
        with self._lock:
            self._refuse_frozen()
            self._sent = True

    def makes(
        self, session: int, step: Kept | None, *, applied: bool, digest: SupportsInt | None = None
    ) -> None:
        """Records that a step has ended here.

        Args:
            session: fingerprint of its session.
            step: step that is kept; None if sites that lack it lack only the decision.
            applied: whether it counts.
            digest: digest of what this site received in it, if nobody voted on it.

        Raises:
            ExchangeError: this site is frozen: the step must not end without the others.
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

    # -- called by the watcher ------------------------------------------------------------------

    @property
    def told(self) -> dict[int, int]:
        """Digests by session, in the form in which they are published."""
        with self._lock:
            return {session: int(digest) for session, digest in self.digests.items()}

    def digests_of_all(self, comm: Comm) -> Digests:
        """Returns the known digests of all sites, after as many steps as this site has made."""
        with self._lock:
            if self._of_all is None or self._of_all.made != self.made:
                own = comm.rank, comm.world_size, self.made
                self._of_all = Digests(*own, self.told)
            return self._of_all

    def message_to(self, site: int, made: int, place: int) -> bytes | None:
        """Returns the bytes that this site sent in the step after `made` steps, if known."""
        with self._lock:
            last = None if self._last is None else self._last.kept
            found = {self.made: self._current, self.made - 1: last}.get(made)
        step = None if found is None else found()
        return None if step is None else step.message_to(site, place)

    # -- when others are lost -------------------------------------------------------------------

    def agree(self, comm: Comm, standing: FailureReport) -> Outcome:
        """Freezes this site and runs an agreement; if it is frozen, waits for that outcome.

        Args:
            comm: the transport, which has a board.
            standing: report of this site, without what is known here.
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
        except RuntimeError:  # not to be had from this site, but perhaps from others
            return None

    # -- sites that join: a barrier ---------------------------------------------------------------
    #
    # All sites agree on the step before which others join. Each reports how many steps it has made,
    # and begins none but the next until all have reported. The others join after one step more than
    # the greatest count: no site has begun more.

    @property
    def goes_on(self) -> MembershipRecord | None:
        """Sites that go on without the others, or with more; None if none do."""
        return None if self._outcome is None else self._outcome.goes_on

    def _begin_to_go_on(self, comm: Comm) -> None:
        """Begins at once, also while the loop computes, because the others wait."""
        if (found := self.goes_on) is not None:
            self.opens = comm.go_on(found.sites, found.coming)

    def _refuse_frozen(self) -> None:
        if self.frozen:
            raise ExchangeError("the other sites gave up", kind=Failure.CLOSED)

    def pauses(self) -> int:
        """Pauses after the next step until the join step is agreed.

        Returns:
            Number of steps made at the first call.
        """
        with self._lock:
            if self._pauses_at is None:
                self._pauses_at = self.made + 1
            return self._pauses_at - 1

    def turns(self, made: int, coming: Sequence[str]) -> None:
        """Sets the join step: these sites join after `made` steps."""
        with self._lock:
            self._turns_at, self.coming = made, tuple(coming)

    def is_turn(self, comm: Comm) -> bool:
        """True if no step must begin before other sites join; waits until that is known.

        Raises:
            ExchangeError: it does not become known: a site is gone, or late.
        """
        board, until = comm.board, time.monotonic() + comm.patience_s
        while self._is_paused and board is not None:
            gone = list(filter(board.is_gone, range(comm.world_size)))
            if gone and board.slot(GOING_ON) is None:  # else they have gone on with the new sites
                raise ExchangeError(Failure.CLOSED.value, gone, kind=Failure.CLOSED)
            if time.monotonic() > until:
                told = "the sites do not agree on when others take part"
                raise ExchangeError(told, kind=Failure.LOCAL)
            time.sleep(_POLL_S)
        return self._turns_at is not None and self.made >= self._turns_at and not self.frozen

    @property
    def _is_paused(self) -> bool:
        with self._lock:
            unknown = self._pauses_at is not None and self._turns_at is None
            return unknown and self.made >= (self._pauses_at or 0) and not self.frozen

    def turn(self, comm: Comm) -> None:
        """Goes on with more sites, once all have made the same steps.

        Raises:
            ExchangeError: it cannot, or the others go on in another way.
        """
        with self._lock:
            self._refuse_frozen()
            self.frozen = True
        board, everybody = comm.board, range(comm.world_size)
        assert board is not None
        try:
            text = board.first(
                GOING_ON, MembershipRecord.proposed(self.made, everybody, self.coming)
            )
            goes_on = MembershipRecord.of(text, comm.rank, self.made)
            self._outcome = Outcome(Findings(()), goes_on=goes_on)
            self._begin_to_go_on(comm)
        except BoardGoneError as error:
            self._outcome = Outcome(Findings((), doubt=str(error)))
        finally:
            self._ended.set()
        if self.opens is None or not (self.goes_on and self.goes_on.coming):
            self._refuse_frozen()


def _gone_through(agreement: Agreement, board: Board, session: int) -> Outcome:
    """Runs an agreement: sends it the board's answers to its requests."""
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
    """Checks, if this site was suspended, that the others have not gone on without it.

    Args:
        comm: the transport.
        began: start of the step, by the monotonic clock.

    Raises:
        ExchangeError: they have.
    """
    if comm.board is None or time.monotonic() - began < comm.patience_s / 2:
        return
    with suppress(BoardGoneError):
        if is_in_trouble(comm.board):
            raise ExchangeError("the other sites gave up", kind=Failure.CLOSED)


def is_in_trouble(board: Board) -> bool:
    """True if some site has aborted."""
    return board.slot(TROUBLE) is not None
