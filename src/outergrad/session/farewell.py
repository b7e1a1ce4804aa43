"""What a site tells the others when it leaves: by `detach()`, by an error, at the end of Python.

They find its connections closed, and would not know whether its machine died or its program did.
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

from outergrad.comm.standing import Standing
from outergrad.core.transport import Comm, Notes
from outergrad.star.transport import leave_all_stars
from outergrad.step.groups import Sessions, on_transport

_SETTLES_S = 6.0
"""Longer than the last calls of a store may take, each of which has a limit of its own."""
_farewells: WeakKeyDictionary[Any, tuple[Farewell, finalize[..., Any]]] = WeakKeyDictionary()
"""Of the transport of each session of this process, and what is done when nobody has it any more,
or Python ends; weak, so that process groups end when the user's do."""
_before: list[Any] = []
"""The `sys.excepthook` that was there, while ours is."""


def say_farewell(comm: Comm, session: int) -> None:
    """Lets the other sites hear of it when a session ends, and how."""
    notes = None if comm.world_size == 1 else comm.notes(session)
    if notes is None:
        return
    farewell = Farewell(on_transport(comm.key), notes, session)
    _farewells[comm] = farewell, finalize(comm, farewell.end_session)
    if not _before:
        _before.append(sys.excepthook)
        sys.excepthook = _on_error


def leave_all() -> None:
    """Leaves word of the end of this process, before watchers end; settles, and hangs up."""
    settling = list[threading.Thread]()
    for comm, (farewell, end) in list(_farewells.items()):
        if not farewell.is_own:
            continue
        sessions = list(on_transport(comm.key).attached)
        on_transport(comm.key).attached.clear()  # no session goes on
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


atexit.register(leave_all)


def end_session(comm: Any) -> None:
    """Ends a session now: leaves word of that."""
    if comm in _farewells:
        _, end = _farewells.pop(comm)
        end()
    if not _farewells and _before and sys.excepthook is _on_error:
        sys.excepthook = _before.pop()


class Farewell:
    """Of one session of this process.

    A forked process, as of a data loader, has the same connection to the store, and keeps silent.

    Args:
        group: the sessions on its transport.
        notes: where to leave something.
        session: its fingerprint.
    """

    def __init__(self, group: Sessions, notes: Notes, session: int) -> None:
        self._group, self._notes, self._session = group, notes, session
        self._process = os.getpid()

    @property
    def is_own(self) -> bool:
        """Whether it is of this process, not of one that this was forked from."""
        return self._process == os.getpid()

    def end_session(self) -> None:
        """Tells how many steps it has made."""
        self._leave("session")

    def end_process(self, why: str, comm: Comm) -> None:
        """Tells what error ends the program; waits for others to read it where it is first."""
        if self._leave("process", why) and comm.rank == comm.host:
            comm.close()
            self._notes.stay([site for site in range(comm.world_size) if site != comm.rank])

    def _leave(self, ended: str, why: str = "") -> bool:
        """Whether there was something to say."""
        if not self.is_own or self._group.lost is not None:
            return False
        # Not by len(): of a session that is being collected the set may not have heard yet.
        goes_on = ended == "session" and any(True for _ in self._group.attached)
        pact, about = self._group.pact, {"goes_on": goes_on, "why": why, "ended": ended}
        known = {"ends": self._group.ends, "made": pact.made, "digests": pact.told}
        standing = Standing(0, self._session, **known, **about)
        self._notes.leave_at_end(standing.text(), of_process=ended == "process")
        return True


def _on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As `sys.excepthook`, in front of the one that was there."""
    try:
        for comm, (farewell, _) in list(_farewells.items()):
            with suppress(Exception):  # the user's own error is what matters
                farewell.end_process(f"{kind.__name__}: {error}".rstrip(": "), comm)
    finally:
        _before[0](kind, error, trace)
