"""Reliable frames between two sides: in order, none twice, and none lost with a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from outergrad.star.frames import DATA, HEADER_BYTES, UNNUMBERED, Frame, MalformedError


@dataclass(frozen=True)
class _Kept:
    frame: Frame
    taken: Callable[[], None] | None


class Pipe:
    """One end of a line, which keeps the frames it has sent until they are acknowledged.

    It is independent of streams: after a new one has begun, `resume` sends missing frames again.
    """

    def __init__(self) -> None:
        self._unsent: deque[_Kept] = deque()
        self._unheard: deque[_Kept] = deque()
        self._pushed = 0
        self.heard = 0
        """Number of the last frame received from the other side."""

    def push(self, frame: Frame, taken: Callable[[], None] | None = None) -> None:
        """Queues a frame.

        Args:
            frame: its sequence number is set here.
            taken: called when the other side has the frame, or never will.
        """
        self._pushed += 1
        self._unsent.append(_Kept(frame._replace(sequence=self._pushed), taken))

    def batch(self, most_bytes: int) -> list[Frame]:
        """Returns the next frames to send: one, or several of so many bytes together at most."""
        found, room = [], most_bytes
        while self._unsent:
            frame = self._unsent[0].frame
            room -= len(frame.payload) + HEADER_BYTES
            if found and room < 0:
                break
            self._unheard.append(self._unsent.popleft())
            found.append(frame)
        return found

    def accept(self, frame: Frame) -> bool:
        """Counts a frame; True if it was not received before.

        Raises:
            MalformedError: a frame before it is missing.
        """
        if frame.kind in UNNUMBERED:
            return True
        if frame.sequence > self.heard + 1:
            raise MalformedError(f"frame {frame.sequence} came behind {self.heard}")
        if frame.sequence <= self.heard:
            return False
        self.heard = frame.sequence
        return True

    def acknowledge(self, sequence: int) -> bool:
        """Drops frames up to this number, which have arrived; True if any is of a collective.

        Raises:
            MalformedError: the frame was never sent.
        """
        if sequence > self._pushed - len(self._unsent):
            raise MalformedError(f"frame {sequence} was never sent")
        has_moved = False
        while self._unheard and self._unheard[0].frame.sequence <= sequence:
            kept = self._unheard.popleft()
            has_moved = has_moved or kept.frame.kind in DATA
            _let_go(kept)
        return has_moved

    def resume(self, sequence: int) -> None:
        """Queues the frames behind this number again, for a new stream.

        Raises:
            MalformedError: the frame was never sent.
        """
        self.acknowledge(sequence)
        while self._unheard:
            self._unsent.appendleft(self._unheard.pop())

    def clear(self) -> None:
        """Drops all frames, which the other side will never receive."""
        for queue in (self._unheard, self._unsent):
            while queue:
                _let_go(queue.popleft())

    @property
    def has_unsent(self) -> bool:
        """True if there are frames to send."""
        return bool(self._unsent)

    @property
    def is_empty(self) -> bool:
        """True if the other side has all frames."""
        return not self._unsent and not self._unheard


def _let_go(kept: _Kept) -> None:
    if kept.taken is not None:
        kept.taken()
