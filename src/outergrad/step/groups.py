"""What the sessions on one transport must know of each other."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from outergrad.capture.engine import current_task
from outergrad.comm.standing import LastStep, Standing
from outergrad.core.errors import ExchangeError, SiteLostError, SitesChangedError
from outergrad.core.transport import Comm
from outergrad.step.agreement import Outcome
from outergrad.step.lost import Findings, find_out, find_out_in_mesh, lost_error, standing_of
from outergrad.step.pact import MOST_SESSIONS, Pact
from outergrad.step.turns import Turns
from outergrad.step.watcher import Watcher


class Endable(Protocol):
    """A session, as its neighbours see it."""

    def end_unfinished(self, *, unless: int) -> None:
        """Ends a step whose backward raised, unless it belongs to the backward that runs now."""
        ...


@dataclass
class Sessions:
    """The sessions on one transport.

    Attributes:
        count: how many there have been.
        attached: those that have not been detached. Only a session that is alone may leave headers
            out: they are what tells sessions apart whose order differs between sites.
        running: those in a shared step, in the order in which these began.
        turns: of the steps that a session makes while it is alone.
        lost: why the transport must not be used any more, if a site was lost.
        untold: what the loop has still to be told, where sites go on without others.
        ends: how the last step of each of the latest sessions ended: sites that give up tell it
            each other.
        pact: what this site promises the others, where they have a board.
        watcher: answers them while this site computes.
    """

    count: int = 0
    attached: WeakSet[Any] = field(default_factory=WeakSet)
    running: list[Endable] = field(default_factory=list)
    turns: Turns = field(default_factory=Turns)
    lost: SiteLostError | None = None
    untold: SitesChangedError | None = None
    ends: dict[int, LastStep] = field(default_factory=dict)
    pact: Pact = field(default_factory=Pact)
    watcher: Watcher | None = None

    @property
    def is_calm(self) -> bool:
        """Whether there is nothing to see to before one of them begins a step."""
        return not (self.running or self.lost or self.untold or self.pact.frozen)

    def watch(self, comm: Comm) -> None:
        """Begins to answer the others, unless it is done."""
        if self.watcher is None or not self.watcher.takes(comm):
            self.watcher = Watcher(comm, self.pact, self.ends)

    def end_watching(self) -> None:
        """Answers the others no more, for now."""
        if self.watcher is not None:
            self.watcher.end()
            self.watcher = None

    def note_end(self, session: int, end: LastStep) -> None:
        """A step of a session, known by its fingerprint, has come to its end."""
        if session not in self.ends and len(self.ends) == MOST_SESSIONS:
            del self.ends[next(iter(self.ends))]
        self.ends[session] = end


_SESSIONS: WeakKeyDictionary[Hashable, Sessions] = WeakKeyDictionary()
"""A registry of the process, because transports, as process groups, are its own, too."""


def on_transport(key: Hashable) -> Sessions:
    """The sessions on the transport with this key: for torch.distributed, its process group."""
    found = _SESSIONS.get(key)
    return _SESSIONS.setdefault(key, Sessions()) if found is None else found


def end_unfinished(key: Hashable) -> None:
    """Ends the steps of all sessions of a transport whose backward raised, in their order."""
    task = current_task()
    for session in list(on_transport(key).running):
        session.end_unfinished(unless=task)


def count_session(key: Hashable) -> int:
    """Registers a session and returns its number on the transport."""
    sessions = on_transport(key)
    sessions.count += 1
    return sessions.count


@contextmanager
def lost_sites_told(comm: Comm, place: str, step: int = 0) -> Iterator[None]:
    """Gives up a transport that fails, outside of steps.

    Raises:
        SiteLostError: it failed.
    """
    try:
        yield
    except ExchangeError as error:
        known = {"ends": on_transport(comm.key).ends, "mesh": comm.mesh}
        outcome = give_up(comm, standing_of(error, step, **known))
        raise note_lost(comm, step, place, error, outcome.findings).again() from error


def give_up(comm: Comm, standing: Standing) -> Outcome:
    """Ends the use of a transport, together with the other sites that are left."""
    if comm.mesh is not None:
        ends = {s: end for key in comm.mesh.keys for s, end in on_transport(key).ends.items()}
        told = replace(standing, ends=ends)
        return Outcome(find_out_in_mesh(comm.mesh, told, comm.patience_s))
    if comm.board is None:
        return Outcome(find_out(comm, standing))
    return on_transport(comm.key).pact.agree(comm, standing)


def note_lost(
    comm: Comm, step: int, place: str, error: Exception, found: Findings
) -> SiteLostError:
    """Lets nobody use the transport any more; returns what all who try are told."""
    sessions = on_transport(comm.key)
    sessions.lost = lost_error(comm.rank, step, place, error, found, comm.mesh)
    for key in () if comm.mesh is None else comm.mesh.keys:
        on_transport(key).lost = sessions.lost
    goes_on = sessions.pact.goes_on
    if sessions.pact.opens is not None and goes_on is not None and not goes_on.coming:
        sessions.untold = _changed_error(comm, sessions.lost, goes_on.sites)
    return sessions.lost


def _changed_error(comm: Comm, lost: SiteLostError, sites: Sequence[int]) -> SitesChangedError:
    """What the user is told where sites go on without others.

    Args:
        comm: the transport that they had.
        lost: what would be told otherwise.
        sites: those that go on.
    """
    named_S = [comm.names[site] for site in sites]
    gone = [name for name in comm.names if name not in named_S]
    told = f"{', '.join(gone)} {'was' if len(gone) == 1 else 'were'} lost"
    return SitesChangedError(
        f"{told}, and step {lost.step} was not applied on any site. {', '.join(named_S)} go on: "
        f"call optimizer.zero_grad() and make the next step",
        lost.step,
        named_S,
        gone,
        comm.epoch + 1,
    )


def refuse_lost(key: Hashable) -> None:
    """Checks that a transport can be used.

    Raises:
        SiteLostError: a session on it lost another site.
    """
    lost = on_transport(key).lost
    if lost is not None:
        raise lost.again()
