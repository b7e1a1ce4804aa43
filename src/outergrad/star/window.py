"""How much a site may send before the others have taken what it sent: what bounds all memory."""

from __future__ import annotations

import struct
from collections import Counter

from outergrad.star.frames import LANES, Frame, Kind, MalformedError

WINDOW_BYTES = 8 << 20
"""Per lane of a site, on their way to other sites."""
TEXTS = LANES
"""In the place of a lane: of texts, which the hub alone counts; no site leaves so many."""
_FRAME_BYTES = 1 << 10
"""What a frame costs besides its payload."""
_ACK = struct.Struct(f"!{1 + LANES}Q")


def cost_of(frame: Frame) -> int:
    """Of a window, bytes."""
    return len(frame.payload) + _FRAME_BYTES


class Window:
    """Of one site, at both ends of its line: counts what was sent in each lane, and what was taken.

    Lanes have windows of their own: one that is full must not hold up votes.
    """

    def __init__(self) -> None:
        self._sent: Counter[int] = Counter()
        self.taken: Counter[int] = Counter()

    def is_open(self, lane: int) -> bool:
        """Whether one more frame may be sent."""
        return self._sent[lane] - self.taken[lane] < WINDOW_BYTES

    def send(self, frame: Frame) -> None:
        """Counts one more.

        Raises:
            MalformedError: it should not have been sent yet.
        """
        lane = TEXTS if frame.kind == Kind.TEXT else frame.lane
        if not self.is_open(lane):
            raise MalformedError(f"more than a window of {WINDOW_BYTES} bytes")
        self._sent[lane] += cost_of(frame)

    def ack(self, heard: int) -> Frame:
        """What tells the other end.

        Args:
            heard: number of the last frame that came from there.
        """
        taken = (self.taken[lane] for lane in range(LANES))
        return Frame(Kind.ACK, _ACK.pack(heard, *taken))

    def update(self, ack: Frame) -> None:
        """Takes over what the other end has told of this one.

        Raises:
            MalformedError: it told what cannot be.
        """
        for lane, count in enumerate(_read(ack)[1:]):
            self.taken[lane] = max(self.taken[lane], count)


def heard_in(ack: Frame) -> int:
    """Number of the last frame that the other side has.

    Raises:
        MalformedError: it told what cannot be.
    """
    return _read(ack)[0]


def _read(ack: Frame) -> tuple[int, ...]:
    try:
        return _ACK.unpack(ack.payload)
    except struct.error:
        raise MalformedError("an acknowledgement of another length") from None
