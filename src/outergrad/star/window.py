"""Flow control: how much a site may send ahead of the others, and its queue of what waits."""

from __future__ import annotations

import struct
from collections import Counter, defaultdict, deque
from dataclasses import dataclass

from outergrad.star.frames import (
    MOST_LANES,
    Frame,
    Kind,
    MalformedError,
    chunk_bytes,
    growing_chunk_bytes,
)
from outergrad.star.pipe import Pipe

WINDOW_BYTES = 8 << 20
"""Bytes per lane of a site that may be on their way to other sites."""
TEXTS = MOST_LANES
"""Number in place of a lane for texts, which only the hub counts: no site leaves a window full."""
_FRAME_BYTES = 1 << 10
"""Bytes that a frame costs besides its payload."""
_HEARD, _TAKEN = struct.Struct("!Q"), struct.Struct("!HQ")


def cost_of(frame: Frame) -> int:
    """Returns the bytes that a frame takes of a window."""
    return len(frame.payload) + _FRAME_BYTES


class Window:
    """The window of one site, at both ends of its line: bytes sent and taken in each lane.

    Lanes have windows of their own: a full one must not hold up votes.
    """

    def __init__(self) -> None:
        self._sent: Counter[int] = Counter()
        self.taken: Counter[int] = Counter()

    def is_open(self, lane: int) -> bool:
        """True if one more frame may be sent."""
        return self._sent[lane] - self.taken[lane] < WINDOW_BYTES

    def send(self, frame: Frame) -> None:
        """Counts a frame.

        Raises:
            MalformedError: the frame should not have been sent yet.
        """
        lane = TEXTS if frame.kind == Kind.TEXT else frame.lane
        if not self.is_open(lane):
            raise MalformedError(f"more than a window of {WINDOW_BYTES} bytes")
        self._sent[lane] += cost_of(frame)

    def ack(self, heard: int) -> Frame:
        """Returns the acknowledgement for a site, whose frames up to `heard` have come."""
        taken = (pair for pair in self.taken.items() if pair[0] != TEXTS)
        return ack_of(heard, b"".join(_TAKEN.pack(*pair) for pair in taken))

    def update(self, ack: Frame) -> None:
        """Takes over the bytes that the other end acknowledges as taken.

        Raises:
            MalformedError: the acknowledgement cannot be read.
        """
        heard_in(ack)
        for lane, count in _TAKEN.iter_unpack(ack.payload[_HEARD.size :]):
            self.taken[lane] = max(self.taken[lane], count)


def ack_of(heard: int, taken: bytes = b"") -> Frame:
    """Returns the acknowledgement of frames up to `heard`, with the bytes taken of each lane."""
    return Frame(Kind.ACK, _HEARD.pack(heard) + taken)


def heard_in(ack: Frame) -> int:
    """Returns the number of the last frame that the other side has received.

    Raises:
        MalformedError: the acknowledgement cannot be read.
    """
    payload = ack.payload
    if len(payload) < _HEARD.size or (len(payload) - _HEARD.size) % _TAKEN.size:
        raise MalformedError("an acknowledgement of another length")
    return _HEARD.unpack_from(payload)[0]


@dataclass
class _Message:
    """A message that is being sent.

    Attributes:
        head: fields that all its frames share.
        payload: of the whole message.
        grows: whether its parts become longer.
        sent: bytes that are on their way.
    """

    head: Frame
    payload: memoryview
    grows: bool
    sent: int = 0

    def next_frame(self) -> Frame:
        total, at = len(self.payload), self.sent
        chunk = growing_chunk_bytes(at) if self.grows else chunk_bytes(total)
        part = self.payload[at : at + chunk]
        frame = self.head._replace(payload=part, offset=at, total=total)
        self.sent += len(part)
        return frame


class Outgoing:
    """The messages that a site has to send; callers hold the lock of the line.

    Args:
        pipe: to the hub.
        window: of this site.
    """

    def __init__(self, pipe: Pipe, window: Window) -> None:
        self._pipe, self._window = pipe, window
        self._lanes: defaultdict[int, deque[_Message]] = defaultdict(deque)
        """Messages of each lane that has some."""
        self._last: Frame | None = None

    def add(self, head: Frame, payload: bytes, *, grows: bool = False) -> None:
        """Queues a message.

        Args:
            head: fields that all its frames share.
            payload: not empty, and must not change any more.
            grows: whether its parts become longer.
        """
        self._lanes[head.lane].append(_Message(head, memoryview(payload), grows))

    def end(self, last: Frame) -> None:
        """Queues a frame behind all messages."""
        self._last = last

    def clear(self) -> None:
        """Drops all messages, or their rest, that are not cut into frames yet."""
        self._lanes.clear()

    @property
    def is_due(self) -> bool:
        """True if something can be sent now."""
        return self._pipe.has_unsent or bool(self._open_lanes()) or self._is_last_due

    @property
    def is_empty(self) -> bool:
        """True if the hub has everything."""
        return self._pipe.is_empty and not self._lanes and self._last is None

    @property
    def _is_last_due(self) -> bool:
        return self._last is not None and not self._lanes

    def batch(self, most_bytes: int) -> list[Frame]:
        """Returns the next frames: those still unsent, or else one more of each open lane."""
        if not self._pipe.has_unsent:
            for lane in self._open_lanes():
                self._push_one(lane)
        if self._last is not None and self._is_last_due:
            self._pipe.push(self._last)
            self._last = None
        return self._pipe.batch(most_bytes)

    def _open_lanes(self) -> list[int]:
        return [lane for lane in sorted(self._lanes) if self._window.is_open(lane)]

    def _push_one(self, lane: int) -> None:
        queue = self._lanes[lane]
        frame = queue[0].next_frame()
        self._window.send(frame)
        self._pipe.push(frame)
        if queue[0].sent == len(queue[0].payload):
            queue.popleft()
        if not queue:
            del self._lanes[lane]
