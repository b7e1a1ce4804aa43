"""What the sessions of one process group must know of each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from outergrad._lost import SiteLostError, find_out, lost_error, standing_of
from outergrad._protocols import Comm
from outergrad._tap import current_task
from outergrad._types import ExchangeError


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
    """

    count: int = 0
    attached: WeakSet[Any] = field(default_factory=WeakSet)
    running: list[Endable] = field(default_factory=list)
    lost: SiteLostError | None = None


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
        found = find_out(comm, standing_of(error, step, voted=False))
        lost = on_group(comm.group).lost = lost_error(comm.rank, step, place, error, found)
        raise lost.again() from error


def refuse_lost(group: Any) -> None:
    """Checks that a group can be used.

    Raises:
        SiteLostError: a session on it lost another site.
    """
    lost = on_group(group).lost
    if lost is not None:
        raise lost.again()
