"""The hub's state of a site in a run: its frames under way, its acknowledgements, its stream."""

from __future__ import annotations

import threading
import time

from outergrad.star.frames import DATA, Frame, Kind, MalformedError
from outergrad.star.pipe import Pipe
from outergrad.star.window import WINDOW_BYTES, Window, cost_of, heard_in

_ACK_BYTES = WINDOW_BYTES // 8
"""Bytes received after which an acknowledgement is sent by itself."""
_MOST_UNHEARD = 64
"""Most answers on their way to a site; each of its threads waits for one."""


class Stream:
    """One stream of a site, which a later one replaces."""

    def __init__(self) -> None:
        self.refusal = ""
        """Reason why the hub ended the stream; empty if it did not."""


class Member:
    """A process of a site in a run; callers hold the lock of the hub.

    Args:
        name: of the site, from its certificate.
        rank: of the site.
        instance: random identifier of the process: another one is another member.
        lock: of the hub.
    """

    def __init__(self, name: str, rank: int, instance: str, lock: threading.RLock) -> None:
        self.name, self.rank, self.instance = name, rank, instance
        self.pipe, self.window = Pipe(), Window()
        self.changed = threading.Condition(lock)
        self.stream: Stream | None = None
        self.away_since: float | None = time.monotonic()
        self.has_left = False
        """True if the site said that it leaves; it may still receive what others left for it."""
        self.is_gone = False
        """True if the others were told that the site is gone, for whatever reason."""
        self._owed, self._hurried = 0, False
        self._unheard = 0

    def begin(self, stream: Stream, heard: int) -> None:
        """Begins a new stream in place of the one before; the site has all frames up to `heard`."""
        self.pipe.resume(heard)
        self.stream, self.away_since = stream, None
        self.changed.notify_all()

    def end(self, stream: Stream, refusal: str = "") -> bool:
        """Ends a stream; returns whether it was the current one."""
        stream.refusal = stream.refusal or refusal
        is_current = self.stream is stream
        if is_current:
            self.stream, self.away_since = None, time.monotonic()
        self.changed.notify_all()
        return is_current

    def push(self, frame: Frame, taken: Taken | None = None) -> None:
        """Sends the site a frame, whose arrival `taken` counts."""
        self.pipe.push(frame, taken and taken.once)
        self.changed.notify_all()

    def answer(self, frame: Frame) -> None:
        """Sends the site the answer to its question.

        Raises:
            MalformedError: the site goes on to ask without receiving the answers.
        """
        if self._unheard == _MOST_UNHEARD:
            raise MalformedError("more questions than anybody has")
        self._unheard += 1
        self.pipe.push(frame, self._heard_one)
        self.changed.notify_all()

    def _heard_one(self) -> None:
        self._unheard -= 1

    def hear(self, frame: Frame) -> bool:
        """Counts a frame from the site; True if the run has to process the frame."""
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
        """True if an acknowledgement is due to the site."""
        return self._hurried or self._owed >= _ACK_BYTES

    def took(self, lane: int, nbytes: int) -> None:
        """Notes that all recipients have so many bytes that the site sent."""
        self.window.taken[lane] += nbytes
        self._owed += nbytes
        if self.owes_ack:
            self.changed.notify_all()

    def ack(self) -> Frame:
        """Returns an acknowledgement: the last frame received, and how much the site may send."""
        self._owed, self._hurried = 0, False
        return self.window.ack(self.pipe.heard)


class Taken:
    """A count of a frame's arrivals, which opens its senders' windows when all have it."""

    def __init__(self, count: int, owed: list[tuple[Member, int, int]]) -> None:
        self._left, self._owed = count, owed

    def once(self) -> None:
        """Notes that one more recipient has the frame."""
        self._left -= 1
        if self._left == 0:
            for member, lane, nbytes in self._owed:
                member.took(lane, nbytes)


def relay(frame: Frame, to: list[Member], owed: list[tuple[Member, int, int]]) -> None:
    """Sends a frame on; when all have it, those in `owed` may send more (lane and bytes)."""
    taken = Taken(len(to), owed)
    for member in to:
        member.push(frame, taken)
    if not to:
        for member, lane, nbytes in owed:
            member.took(lane, nbytes)
