"""What the sessions of one process group must know of each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from outergrad._tap import current_task


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
    """

    count: int = 0
    attached: WeakSet[Any] = field(default_factory=WeakSet)
    running: list[Endable] = field(default_factory=list)


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
