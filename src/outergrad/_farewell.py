"""What a site tells the others when it leaves: by `detach()`, by an error, at the end of Python.

They find its connections closed, and would not know whether its machine died or its program did.
"""

from __future__ import annotations

import atexit
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any
from weakref import WeakSet

from outergrad._groups import on_group
from outergrad._protocols import Comm
from outergrad.comm.standing import Standing

_comms: WeakSet[Any] = WeakSet()
"""Of the sessions of this process; weak, so that process groups end when the user's do."""
_before: list[Any] = []
"""The `sys.excepthook` that was there, while ours is."""


def say_farewell(comm: Comm) -> None:
    """Lets the other sites of a transport hear of it when this process ends."""
    if comm.world_size == 1:
        return
    _comms.add(comm)
    if not _before:
        _before.append(sys.excepthook)
        sys.excepthook = _on_error
        atexit.register(_at_exit)


def leave_session(comm: Comm, session: int) -> None:
    """Tells the other sites how a session ended, and nothing more of it at the end of Python."""
    _comms.discard(comm)
    group = on_group(comm.group)
    if comm.world_size > 1 and group.lost is None:
        ends = {one: end for one, end in group.ends.items() if one == session}
        comm.leave(Standing(0, session, ends=ends, ended="session").text(), session)
    if not _comms:
        _stop_listening()


def _stop_listening() -> None:
    """Takes the hooks away, unless somebody has put another one around ours: that one stays."""
    atexit.unregister(_at_exit)
    if _before and sys.excepthook is _on_error:
        sys.excepthook = _before.pop()


def _on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As `sys.excepthook`, in front of the one that was there."""
    try:
        _leave(f"{kind.__name__}: {error}".rstrip(": "))
    finally:
        _before[0](kind, error, trace)


def _at_exit() -> None:
    _leave("")


def _leave(why: str) -> None:
    for comm in list(_comms):
        with suppress(Exception):  # the user's own end is what matters
            group = on_group(comm.group)
            if group.lost is None:
                text = Standing(0, ends=group.ends, why=why, ended="process").text()
                comm.leave_for_good(text, stays=bool(why))
    _comms.clear()
