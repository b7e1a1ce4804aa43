"""Flow control: how much a site may send before the others have it, which bounds all memory."""

from __future__ import annotations

import struct
from collections import Counter

from outergrad.star.frames import LANES, Frame, Kind, MalformedError

WINDOW_BYTES = 8 << 20
"""Bytes per lane of a site that may be on their way to other sites."""
TEXTS = LANES
"""Number in place of a lane for texts, which only the hub counts: no site leaves a window full."""
_FRAME_BYTES = 1 << 10
"""Bytes that a frame costs besides its payload."""
_ACK = struct.Struct(f"!{1 + LANES}Q")


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
        """Returns the acknowledgement for the other end, whose frames up to `heard` have come."""
        taken = (self.taken[lane] for lane in range(LANES))
        return Frame(Kind.ACK, _ACK.pack(heard, *taken))

    def update(self, ack: Frame) -> None:
        """Takes over the bytes that the other end acknowledges as taken.

        Raises:
            MalformedError: the acknowledgement cannot be read.
        """
        for lane, count in enumerate(_read(ack)[1:]):
            self.taken[lane] = max(self.taken[lane], count)


def heard_in(ack: Frame) -> int:
    """Returns the number of the last frame that the other side has received.

    Raises:
        MalformedError: the acknowledgement cannot be read.
    """
    return _read(ack)[0]


def _read(ack: Frame) -> tuple[int, ...]:
    try:
        return _ACK.unpack(ack.payload)
    except struct.error:
        raise MalformedError("an acknowledgement of another length") from None
