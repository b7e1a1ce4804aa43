"""Farewells: the notes that a site leaves when its session, its program or Python ends.

The other sites only see closed connections; the farewell tells them that this was no crash of the
machine, and how many steps the site made.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, finalize

from outergrad.comm.failure_report import FailureReport
from outergrad.core.transport import Comm, Notes
from outergrad.star.transport import leave_all_stars
from outergrad.step.transport_state import TransportState, on_transport

_SETTLES_S = 6.0
"""Longer than the last calls of a store may take, each of which has its own limit."""
_farewells: WeakKeyDictionary[Any, tuple[Farewell, finalize[..., Any]]] = WeakKeyDictionary()
"""Farewell of each session of this process by its transport, with a finalizer that leaves it when
the transport is collected or Python ends. The keys are weak, so that process groups end when the
user's do."""
_before: list[Any] = []
"""The `sys.excepthook` that ours has replaced; empty while ours is not installed."""


def say_farewell(comm: Comm, session: int) -> None:
    """Registers a session so that the other sites are told when and how it ends."""
    notes = None if comm.world_size == 1 else comm.notes(session)
    if notes is None:
        return
    farewell = Farewell(on_transport(comm.key), notes, session)
    _farewells[comm] = farewell, finalize(comm, farewell.end_session)
    if not _before:
        _before.append(sys.excepthook)
        sys.excepthook = _on_error


def leave_all() -> None:
    """Leaves the farewells of this process, settles its sessions, and closes its stars."""
    settling = list[threading.Thread]()
    for comm, (farewell, end) in list(_farewells.items()):
        if not farewell.is_own:
            continue
        sessions = list(on_transport(comm.key).attached)
        on_transport(comm.key).attached.clear()  # so the farewell says that no session goes on
        end()
        settle = threading.Thread(target=_settle, args=(sessions,), daemon=True)
        with suppress(RuntimeError):  # no thread can be started any more
            settle.start()
            settling.append(settle)
    until = time.monotonic() + _SETTLES_S
    for settle in settling:
        settle.join(max(until - time.monotonic(), 0.0))
    leave_all_stars()


def _settle(sessions: list[Any]) -> None:
    for session in sessions:
        session.settle_at_exit()


# atexit calls the last registered first: this runs before the watcher threads end, whose module is
# imported above.
atexit.register(leave_all)


def end_session(comm: Any) -> None:
    """Leaves the farewell of a session that ends now."""
    if comm in _farewells:
        _, end = _farewells.pop(comm)
        end()
    if not _farewells and _before and sys.excepthook is _on_error:
        sys.excepthook = _before.pop()


class Farewell:
    """Farewell of one session of this process.

    A forked process, such as a data loader's worker, has the same connection to the store and
    leaves nothing.

    Args:
        group: the sessions on its transport.
        notes: the place where the other sites read it.
        session: fingerprint of the session.
    """

    def __init__(self, group: TransportState, notes: Notes, session: int) -> None:
        self._group, self._notes, self._session = group, notes, session
        self._process = os.getpid()

    @property
    def is_own(self) -> bool:
        """True if this process made it, not one that this was forked from."""
        return self._process == os.getpid()

    def end_session(self) -> None:
        """Leaves word that the session ended, and after how many steps."""
        self._leave("session")

    def end_process(self, why: str, comm: Comm) -> None:
        """Leaves the error that ends the program.

        The site that holds the store waits, not for long, until the others have read it.
        """
        if self._leave("process", why) and comm.rank == comm.host:
            comm.close()
            self._notes.stay([site for site in range(comm.world_size) if site != comm.rank])

    def _leave(self, ended: str, why: str = "") -> bool:
        """Returns False, and leaves nothing, in a forked process or if sites were lost."""
        if not self.is_own or self._group.lost is not None:
            return False
        # len() of the weak set may still count a session that is being collected.
        goes_on = ended == "session" and any(True for _ in self._group.attached)
        participant = self._group.participant
        about = {"goes_on": goes_on, "why": why, "ended": ended}
        known = {"ends": self._group.ends, "made": participant.made, "digests": participant.told}
        standing = FailureReport(0, self._session, **known, **about)
        self._notes.leave_at_end(standing.text(), of_process=ended == "process")
        return True


def tell_all(error: BaseException) -> None:
    """Leaves the error that ends the program, as farewell of all sessions of this process."""
    interrupted = isinstance(error, KeyboardInterrupt)
    why = "Ctrl-C" if interrupted else f"{type(error).__name__}: {error}".rstrip(": ")
    for comm, (farewell, _) in list(_farewells.items()):
        with suppress(Exception):  # the user's own error is what matters
            farewell.end_process(why, comm)


def _on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook` that leaves the farewells, then calls the hook that it has replaced."""
    try:
        tell_all(error)
    finally:
        _before[0](kind, error, trace)
