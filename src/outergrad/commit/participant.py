"""This site's commit machine on one transport, behind a lock: loop and watcher share it.

A step is made once it is counted here: from then on the others can have its result from this site.
A site that aborts, or learns that others do, is frozen: it makes no more steps except those that
all agree on (`agreement.py`). `machine.py` decides; this performs its actions.
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
from outergrad.commit.board_io import performed
from outergrad.commit.board_requests import Asking
from outergrad.commit.digests import Digests
from outergrad.commit.joining import is_join_due, joined
from outergrad.commit.machine import IS_OVER, Action, CommitMachine, CommitState, Event, must_look
from outergrad.commit.membership_record import MembershipRecord
from outergrad.commit.peer_requests import Question, sent_again
from outergrad.commit.step_result import StepResult
from outergrad.core.errors import BoardGoneError, ExchangeError, Failure
from outergrad.core.transport import Board, Comm

MOST_SESSIONS = 64
"""Number of sessions, the latest ones, of which other sites are told."""


class Kept(Protocol):
    """A step that another site may still ask about."""

    @property
    def waits_s(self) -> float:
        """Seconds of this site's longest wait in the step, the current one included."""
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
        session: fingerprint of the session whose step ended last.
        asked: number of requests of other sites that were read.
        digests: digest, by session, of its last steps; only of those that nobody voted on.
        opens: opens the transport of the sites that go on, once that is agreed.
        coming: names of the sites that are going to join.
    """

    def __init__(self) -> None:
        self.session, self.asked = 0, 0
        self.digests: dict[int, SupportsInt] = {}
        self.opens: Callable[[], Comm] | None = None
        self.coming: Sequence[str] = ()
        self._machine = CommitMachine()
        self._of_all: Digests | None = None
        self._last: _Step | None = None
        self._current: ref[Any] | None = None
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._outcome: Outcome | None = None

    @property
    def made(self) -> int:
        """Number of steps that have ended, of all sessions."""
        return self._machine.made

    @property
    def frozen(self) -> bool:
        """True if this site makes no more steps."""
        return self._machine.state in IS_OVER

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
            if self._machine.on(Event.SENDS):
                raise _given_up()

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
            if self._machine.make():
                raise _given_up()
            self.session, self._current = session, None
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
            is_current = self._machine.knows(made)
            last = None if self._last is None else self._last.kept
        found = None if is_current is None else self._current if is_current else last
        step = None if found is None else found()
        return None if step is None else step.message_to(site, place)

    def ask_again(self, comm: Comm, site: int, place: int, nbytes: int) -> bytes:
        """Requests another site's message of the current step once more: it came damaged.

        Raises:
            ExchangeError: it does not come.
        """
        return sent_again(comm, Question(comm.rank, site, self.made, place), self.asked, nbytes)

    # -- when others are lost -------------------------------------------------------------------

    def agree(self, comm: Comm, standing: FailureReport) -> Outcome:
        """Freezes this site and runs an agreement; if it is frozen, waits for that outcome.

        Args:
            comm: the transport, which has a board.
            standing: report of this site, without what is known here.
        """
        with self._lock:
            sent = self._machine.state is CommitState.SENT
            actions, made = self._machine.on(Event.FAILED), self._machine.made
        if Action.AWAIT in actions:
            self._ended.wait()
            assert self._outcome is not None
            return self._outcome
        assert comm.board is not None
        waited_s = max(standing.waited_s, self._waits_s)
        word = replace(standing, made=made, sent=sent, waited_s=waited_s)
        own = comm.rank, comm.world_size, comm.host, comm.patience_s
        how = self._content, time.monotonic, comm.close, comm.min_sites
        agreement = Agreement(*own, word, *how)
        return self._go_by(comm, agreement.reach(), word.session)

    def _go_by(self, comm: Comm, asking: Asking[Outcome], session: int) -> Outcome:
        """Runs an agreement on the board, and moves at once, because the others wait."""
        assert comm.board is not None
        try:
            outcome = self._outcome = performed(comm.board, asking, session)
            goes_on = outcome.goes_on
            with self._lock:
                actions = self._machine.on(Event.PARTED if goes_on is None else Event.AGREED)
            if Action.MOVE in actions and goes_on is not None:
                self.opens = comm.go_on(goes_on.sites, goes_on.coming)
        finally:
            self._ended.set()
        return outcome

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

    # -- sites that join ----------------------------------------------------------------------

    @property
    def goes_on(self) -> MembershipRecord | None:
        """Sites that go on without the others, or with more; None if none do."""
        return None if self._outcome is None else self._outcome.goes_on

    def come(self) -> int:
        """Others wait to join. Returns the step count to tell; pauses after one step more."""
        with self._lock:
            return self._machine.come()

    def set_join(self, told: int, coming: Sequence[str]) -> None:
        """Sets the join step: `told` is the greatest step count that sites have told."""
        with self._lock:
            self._machine.set_join(told)
            self.coming = tuple(coming)

    def begin(self) -> tuple[Action, ...]:
        """A step is to begin. Returns `PAUSE` if it must not yet, `JOIN` if others join before."""
        with self._lock:
            return self._machine.begin()

    def is_join_due(self, comm: Comm) -> bool:
        """True if other sites join before the next step; waits until that is known.

        Raises:
            ExchangeError: it does not become known: a site is gone, or late.
        """
        if comm.board is None:
            return False
        due = is_join_due(self, comm.world_size, comm.patience_s, time.monotonic)
        return performed(comm.board, due)

    def join(self, comm: Comm) -> None:
        """Goes on with more sites, once all have made the same steps.

        Raises:
            ExchangeError: it cannot, or the others go on in another way.
        """
        with self._lock:
            if Action.PROPOSE not in self._machine.on(Event.JOINS):
                raise _given_up()
        asking = joined(self.made, comm.rank, comm.world_size, self.coming)
        goes_on = self._go_by(comm, asking, 0).goes_on
        if goes_on is None or not goes_on.coming:
            raise _given_up()


def _given_up() -> ExchangeError:
    return ExchangeError("the other sites gave up", kind=Failure.CLOSED)


def refuse_if_given_up(comm: Comm, began: float) -> None:
    """Checks, if this site was suspended, that the others have not gone on without it.

    Args:
        comm: the transport.
        began: start of the step, by the monotonic clock.

    Raises:
        ExchangeError: they have.
    """
    if comm.board is None or not must_look(time.monotonic() - began, comm.patience_s):
        return
    with suppress(BoardGoneError):
        if is_in_trouble(comm.board):
            raise _given_up()


def is_in_trouble(board: Board) -> bool:
    """True if some site has aborted."""
    return board.slot(TROUBLE) is not None
