"""A site as the hub knows it: its place in a run, what it is owed, and whether its line stands."""

from __future__ import annotations

import threading
import time

from outergrad.star.frames import DATA, Frame, Kind, MalformedError
from outergrad.star.pipe import Pipe
from outergrad.star.window import WINDOW_BYTES, Window, cost_of, heard_in

_ACK_BYTES = WINDOW_BYTES // 8
"""An acknowledgement that nothing else carries is sent after so much."""
_MOST_UNHEARD = 64
"""Answers on their way to a site; each of its threads waits for one."""


class Stream:
    """One stream of a site; a later one takes its place."""

    def __init__(self) -> None:
        self.refusal = ""
        """Why the hub ended it, if it did."""


class Member:
    """A process of a site in a run. Whoever calls its methods holds the lock of the hub.

    Args:
        name: of the site, from its certificate.
        rank: its place among the sites.
        instance: drawn by the process: another one is another member.
        lock: of the hub.
    """

    def __init__(self, name: str, rank: int, instance: str, lock: threading.RLock) -> None:
        self.name, self.rank, self.instance = name, rank, instance
        self.pipe, self.window = Pipe(), Window()
        self.changed = threading.Condition(lock)
        self.stream: Stream | None = None
        self.away_since: float | None = time.monotonic()
        self.has_left = False
        """Whether it said that it leaves; it may still hear what others left for it."""
        self.is_gone = False
        """Whether the others were told so, for one reason or another."""
        self._owed, self._hurried = 0, False
        self._unheard = 0

    def begin(self, stream: Stream, heard: int) -> None:
        """A new stream takes over.

        Args:
            stream: this.
            heard: number of the last frame that the site has.
        """
        self.pipe.resume(heard)
        self.stream, self.away_since = stream, None
        self.changed.notify_all()

    def end(self, stream: Stream, refusal: str = "") -> bool:
        """A stream ended; returns whether it was the one that counts."""
        stream.refusal = stream.refusal or refusal
        is_current = self.stream is stream
        if is_current:
            self.stream, self.away_since = None, time.monotonic()
        self.changed.notify_all()
        return is_current

    def push(self, frame: Frame, taken: Taken | None = None) -> None:
        """Sends it a frame.

        Args:
            frame: this.
            taken: what waits for that.
        """
        self.pipe.push(frame, taken and taken.once)
        self.changed.notify_all()

    def answer(self, frame: Frame) -> None:
        """Sends it what it has asked for.

        Raises:
            MalformedError: it goes on to ask without listening.
        """
        if self._unheard == _MOST_UNHEARD:
            raise MalformedError("more questions than anybody has")
        self._unheard += 1
        self.pipe.push(frame, self._heard_one)
        self.changed.notify_all()

    def _heard_one(self) -> None:
        self._unheard -= 1

    def hear(self, frame: Frame) -> bool:
        """Whether a frame from it has to be looked at; counts it."""
        if frame.kind == Kind.ACK:
            self.pipe.acknowledge(heard_in(frame))
            return False
        if not self.pipe.accept(frame):
            return False
        if frame.kind in DATA or frame.kind == Kind.TEXT:
            self.window.send(frame)
        self._owed += cost_of(frame)
        self._hurried = self._hurried or frame.kind not in DATA
        if self.owes_ack:
            self.changed.notify_all()
        return True

    @property
    def owes_ack(self) -> bool:
        """Whether it waits to hear how far it was heard."""
        return self._hurried or self._owed >= _ACK_BYTES

    def took(self, lane: int, nbytes: int) -> None:
        """All others have so much of what it sent."""
        self.window.taken[lane] += nbytes
        self._owed += nbytes
        if self.owes_ack:
            self.changed.notify_all()

    def ack(self) -> Frame:
        """How far it was heard, and what it may send."""
        self._owed, self._hurried = 0, False
        return self.window.ack(self.pipe.heard)


class Taken:
    """Of what one or several members sent: tells them when all others have it."""

    def __init__(self, count: int, owed: list[tuple[Member, int, int]]) -> None:
        self._left, self._owed = count, owed

    def once(self) -> None:
        """One more has it."""
        self._left -= 1
        if self._left == 0:
            for member, lane, nbytes in self._owed:
                member.took(lane, nbytes)


def relay(frame: Frame, to: list[Member], owed: list[tuple[Member, int, int]]) -> None:
    """Sends a frame on.

    Args:
        frame: this.
        to: members.
        owed: members that may send more when all of these have it: lane and bytes.
    """
    taken = Taken(len(to), owed)
    for member in to:
        member.push(frame, taken)
    if not to:
        for member, lane, nbytes in owed:
            member.took(lane, nbytes)
