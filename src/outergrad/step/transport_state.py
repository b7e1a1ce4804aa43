"""State that the sessions on one transport share."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from outergrad.capture.engine import current_task
from outergrad.comm.failure_report import FailureReport, LastStep
from outergrad.commit.agreement import Outcome
from outergrad.commit.lost import Findings, find_out, find_out_in_mesh, lost_error, standing_of
from outergrad.commit.participant import MOST_SESSIONS, CommitParticipant
from outergrad.commit.watcher import Watcher
from outergrad.core.errors import ExchangeError, SiteLostError, SitesChangedError
from outergrad.core.transport import Comm

MOST_TURNS = 1 << 27
"""Turns in all, as none may come twice; receives of later steps are not posted ahead."""

_PER_STEP = 64
"""Skipped turns per additional equal step that must come before receives are posted ahead."""


class MessageSequence:
    """Counts the turns of the steps on one transport.

    Receives that were posted for a skipped turn stay with the transport for ever. So the more there
    are, the more equal steps must come before receives are posted ahead again: of T steps at most
    about 8 sqrt(T) skip a turn.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._expected: object = None
        self._equal = self._left_out = 0
        self._is_ahead = False

    def begin(self, lengths: object, ahead: object = None) -> tuple[int, Sequence[int]]:
        """Begins a step whose messages do not mix with those of other sessions.

        Args:
            lengths: key of the lengths of all its messages, the same on all sites.
            ahead: expected key of the next step; None for the same one.

        Returns:
            The turn of the step, 0 if none are left, and the turns whose receives are to be posted
            now, in this order.
        """
        if self._turn + 2 >= MOST_TURNS:
            return 0, ()
        follows = lengths == self._expected
        if self._is_ahead and not follows:
            self._left_out += 1
        self._turn += 1 if follows else 2
        self._equal = self._equal + 1 if follows else 0
        posted = [self._turn] if self._is_ahead and follows else []
        self._expected = lengths if ahead is None else ahead
        self._is_ahead = self._equal > self._left_out // _PER_STEP
        wanted = range(self._turn, self._turn + 1 + self._is_ahead)
        return self._turn, [turn for turn in wanted if turn not in posted]


class Endable(Protocol):
    """A session, as seen by the other sessions on its transport."""

    def end_unfinished(self, *, unless: int) -> None:
        """Ends a step whose backward raised, unless it belongs to task `unless`, which runs now."""
        ...


@dataclass
class TransportState:
    """State of the sessions on one transport.

    Attributes:
        count: number of sessions so far.
        attached: sessions that have not been detached. Only a session that is alone may leave
            headers out: they tell sessions apart whose order differs between sites.
        running: sessions in a synchronised step, in the order in which their steps began.
        turns: message sequence of the steps that a session makes while it is alone.
        lost: error after which the transport must not be used any more, if a site was lost.
        untold: error that the loop has still to be told, if sites go on without others.
        ends: how the last step of each of the latest sessions ended, for sites that abort.
        participant: commit participant of this site; used where there is a board.
        watcher: thread that answers the other sites while this site computes.
    """

    count: int = 0
    attached: WeakSet[Any] = field(default_factory=WeakSet)
    running: list[Endable] = field(default_factory=list)
    turns: MessageSequence = field(default_factory=MessageSequence)
    lost: SiteLostError | None = None
    untold: SitesChangedError | None = None
    ends: dict[int, LastStep] = field(default_factory=dict)
    participant: CommitParticipant = field(default_factory=CommitParticipant)
    watcher: Watcher | None = None

    @property
    def is_calm(self) -> bool:
        """True if nothing has to be handled before a session begins a step."""
        return not (self.running or self.lost or self.untold or self.participant.frozen)

    def watch(self, comm: Comm) -> None:
        """Starts the watcher, unless a running one takes the transport."""
        if self.watcher is None or not self.watcher.takes(comm):
            self.watcher = Watcher(comm, self.participant, self.ends)

    def end_watching(self) -> None:
        """Ends the watcher, for now."""
        if self.watcher is not None:
            self.watcher.end()
            self.watcher = None

    def note_end(self, session: int, end: LastStep) -> None:
        """Records how the last step of a session, given by its fingerprint, has ended."""
        if session not in self.ends and len(self.ends) == MOST_SESSIONS:
            del self.ends[next(iter(self.ends))]
        self.ends[session] = end


_SESSIONS: WeakKeyDictionary[Hashable, TransportState] = WeakKeyDictionary()
"""Registry of the process, to which transports, like process groups, belong, too."""


def on_transport(key: Hashable) -> TransportState:
    """Returns the state of the transport with this key: a process group of torch.distributed."""
    found = _SESSIONS.get(key)
    return _SESSIONS.setdefault(key, TransportState()) if found is None else found


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
    """Aborts the use of a transport that fails outside of steps.

    Raises:
        SiteLostError: it failed.
    """
    try:
        yield
    except ExchangeError as error:
        known = {"ends": on_transport(comm.key).ends, "mesh": comm.mesh}
        outcome = give_up(comm, standing_of(error, step, **known))
        raise note_lost(comm, step, place, error, outcome.findings).again() from error


def give_up(comm: Comm, standing: FailureReport) -> Outcome:
    """Aborts the use of a transport, together with the other sites that are left."""
    if comm.mesh is not None:
        ends = {s: end for key in comm.mesh.keys for s, end in on_transport(key).ends.items()}
        told = replace(standing, ends=ends)
        return Outcome(find_out_in_mesh(comm.mesh, told, comm.patience_s))
    if comm.board is None:
        return Outcome(find_out(comm, standing))
    return on_transport(comm.key).participant.agree(comm, standing)


def note_lost(
    comm: Comm, step: int, place: str, error: Exception, found: Findings
) -> SiteLostError:
    """Bars the transport from further use; returns the error that every attempt raises."""
    sessions = on_transport(comm.key)
    sessions.lost = lost_error(comm, step, place, error, found)
    for key in () if comm.mesh is None else comm.mesh.keys:
        on_transport(key).lost = sessions.lost
    goes_on = sessions.participant.goes_on
    if sessions.participant.opens is not None and goes_on is not None and not goes_on.coming:
        sessions.untold = _changed_error(comm, sessions.lost, goes_on.sites)
    return sessions.lost


def _changed_error(comm: Comm, lost: SiteLostError, sites: Sequence[int]) -> SitesChangedError:
    """Returns the error for a loop whose sites go on without others.

    Args:
        comm: transport of all sites, before the change.
        lost: error that would be raised otherwise.
        sites: ranks of the sites that go on.
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
