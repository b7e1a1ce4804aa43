"""What the sessions of one process group must know of each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from outergrad.capture.engine import current_task
from outergrad.comm.standing import LastStep
from outergrad.core.errors import ExchangeError, SiteLostError
from outergrad.core.transport import Comm
from outergrad.step.lost import Findings, find_out, lost_error, standing_of

_MOST_SESSIONS = 64


class Endable(Protocol):
    """A session, as its neighbours see it."""

    def end_unfinished(self, *, unless: int) -> None:
        """Ends a step whose backward raised, unless it belongs to the backward that runs now."""
        ...


@dataclass
class Sessions:
    """The sessions on one process group.

    Attributes:
        count: how many there have been.
        attached: those that have not been detached. Only a session that is alone may leave headers
            out: they are what tells sessions apart whose order differs between sites.
        running: those in a shared step, in the order in which these began.
        lost: why the group must not be used any more, if a site was lost.
        ends: how the last step of each of the latest sessions ended: sites that give up tell it
            each other.
    """

    count: int = 0
    attached: WeakSet[Any] = field(default_factory=WeakSet)
    running: list[Endable] = field(default_factory=list)
    lost: SiteLostError | None = None
    ends: dict[int, LastStep] = field(default_factory=dict)

    def note_end(self, session: int, end: LastStep) -> None:
        """A step of a session, known by its fingerprint, has come to its end."""
        if session not in self.ends and len(self.ends) == _MOST_SESSIONS:
            del self.ends[next(iter(self.ends))]
        self.ends[session] = end


_GROUPS: WeakKeyDictionary[Any, Sessions] = WeakKeyDictionary()
"""A registry of the process, because process groups are its own, too."""


def on_group(group: Any) -> Sessions:
    """The sessions on a process group."""
    return _GROUPS.setdefault(group, Sessions())


def end_unfinished(group: Any) -> None:
    """Ends the steps of all sessions of a group whose backward raised, in their order."""
    task = current_task()
    for session in list(on_group(group).running):
        session.end_unfinished(unless=task)


def count_session(group: Any) -> int:
    """Registers a session and returns its number on the group."""
    sessions = on_group(group)
    sessions.count += 1
    return sessions.count


@contextmanager
def lost_sites_told(comm: Comm, place: str, step: int = 0) -> Iterator[None]:
    """Gives up a group whose transport fails, outside of steps.

    Raises:
        SiteLostError: it failed.
    """
    try:
        yield
    except ExchangeError as error:
        found = find_out(comm, standing_of(error, step, ends=on_group(comm.group).ends))
        raise note_lost(comm, step, place, error, found).again() from error


def note_lost(
    comm: Comm, step: int, place: str, error: Exception, found: Findings
) -> SiteLostError:
    """Lets nobody use the group any more; returns what all who try are told."""
    lost = on_group(comm.group).lost = lost_error(comm.rank, step, place, error, found)
    return lost


def refuse_lost(group: Any) -> None:
    """Checks that a group can be used.

    Raises:
        SiteLostError: a session on it lost another site.
    """
    lost = on_group(group).lost
    if lost is not None:
        raise lost.again()
