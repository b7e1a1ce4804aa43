"""A thread that serves other sites' requests to this one, also while it computes."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any
from weakref import WeakSet

from outergrad.comm.failure_report import FailureReport, LastStep
from outergrad.commit.board_io import performed
from outergrad.commit.digests import Digests, tell_made
from outergrad.commit.joining import hear_of_coming
from outergrad.commit.participant import CommitParticipant, is_in_trouble
from outergrad.commit.peer_requests import MADE, Question, answer_key, asked_slot
from outergrad.core.errors import BoardGoneError
from outergrad.core.transport import Board, Comm

POLL_S = 0.25
_SOON_S = 0.02
"""Seconds between polls while another site waits for an answer that is incomplete."""
_ENDS_S = 3.0
"""Seconds to wait for the thread to end: the store may hang."""


class Watcher:
    """Watcher of one transport, for all sessions on it; it ends when none of them is left.

    Args:
        comm: transport of the first session; it has a board.
        participant: commit participant of this site.
        ends: last step of each session, updated by these.
    """

    def __init__(
        self, comm: Comm, participant: CommitParticipant, ends: dict[int, LastStep]
    ) -> None:
        board = comm.board
        assert board is not None
        self._rank, self._board, self._participant, self._ends = comm.rank, board, participant, ends
        self._stop, self._waiting = threading.Event(), set[int]()
        self._unread: Digests | None = None
        self._pauses = False
        self._process = os.getpid()
        self._comms: WeakSet[Any] = WeakSet([comm])
        self._lock, self._over = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="outergrad watcher", daemon=True)
        _WATCHERS.add(self)
        self._thread.start()

    def takes(self, comm: Comm) -> bool:
        """Adds a session's transport; returns False if the watcher has come to its end."""
        if self._process != os.getpid():
            return False
        with self._lock:
            if not self._over:
                self._comms.add(comm)
            return not self._over

    def end(self) -> None:
        """Stops the thread, and waits until it has ended."""
        if self._halt() and self._thread is not threading.current_thread():
            self._thread.join(_ENDS_S)

    def _halt(self) -> bool:
        """Stops the thread if it is of this process: in a forked one its locks may be taken."""
        is_own = self._process == os.getpid()
        if is_own:
            self._stop.set()
        return is_own

    def _run(self) -> None:
        try:
            slots = self._board.without_limit()
            while (
                not self._stop.wait(self._poll_s)
                and not self._participant.frozen
                and self._is_needed()
            ):
                self._look(slots)
        except BoardGoneError:
            pass
        finally:
            self._over = True

    @property
    def _poll_s(self) -> float:
        is_awaited = self._unread is not None or (self._pauses and not self._participant.coming)
        return _SOON_S if is_awaited else POLL_S

    def _is_needed(self) -> bool:
        with self._lock:
            self._over = not self._comms
            return not self._over

    def _look(self, slots: Board) -> None:
        if is_in_trouble(slots):
            self._give_up()
        while (text := slots.slot(asked_slot(self._participant.asked))) is not None:
            self._answer(self._participant.asked, Question.of_text(text))
            self._participant.asked += 1
        for made in [n for n in self._waiting if n <= self._participant.made]:
            self._tell(made)
            self._waiting.remove(made)
        self._read(slots)
        self._hear_of_coming(slots)

    def _tell(self, made: int) -> None:
        """Publishes that this site has made `made` steps, with their digests if still known."""
        comm = next(iter(self._comms), None)
        digests = None if comm is None else self._participant.digests_of_all(comm)
        if digests is None or digests.made != made:
            performed(self._board, tell_made(self._rank, made, {}))
            return
        performed(self._board, digests.tell())
        self._unread = digests

    def _hear_of_coming(self, slots: Board) -> None:
        """Agrees with all sites on the step before which waiting sites join."""
        comm, participant = next(iter(self._comms), None), self._participant
        if comm is None or comm.min_sites is None or len(self._comms) > 1 or participant.coming:
            return
        heard = hear_of_coming(participant, self._rank, comm.world_size)
        self._pauses = performed(slots, heard)

    def _read(self, slots: Board) -> None:
        """Reads the others' digests now, because they may be gone at this site's final barrier."""
        digests = self._unread
        if digests is None:
            return
        performed(slots, digests.look())
        if not digests.missing:
            performed(slots, digests.say_read())
        if not digests.missing or digests.made != self._participant.made:
            self._unread = None

    def _give_up(self) -> None:
        comm = next(iter(self._comms), None)
        if comm is not None:
            step, session = 0, self._participant.session
            if session in self._ends:
                step = self._ends[session].steps
            self._participant.agree(comm, FailureReport(step, session, ends=dict(self._ends)))

    def _answer(self, number: int, asked: Question | None) -> None:
        if asked is None or asked.by == self._rank:
            return
        if asked.place == MADE:
            self._waiting.add(asked.made)
        elif asked.of == self._rank:
            content = self._participant.message_to(asked.by, asked.made, asked.place)
            if content is not None:
                self._board.put(answer_key(number), content)


_WATCHERS: WeakSet[Watcher] = WeakSet()


def _end_all() -> None:
    """Ends all watchers: no thread may be inside PyTorch while the interpreter goes."""
    for watcher in list(_WATCHERS):
        watcher.end()


atexit.register(_end_all)
