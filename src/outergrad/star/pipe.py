"""Frames between two sides: in order, none twice, and none lost where a stream breaks."""

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
    """One side's end: what it has sent stays here until the other side has said that it is there.

    It knows nothing of streams: after a new one has begun, `resume` sends again what is missing.
    """

    def __init__(self) -> None:
        self._unsent: deque[_Kept] = deque()
        self._unheard: deque[_Kept] = deque()
        self._pushed = 0
        self.heard = 0
        """Number of the last frame that came from the other side."""

    def push(self, frame: Frame, taken: Callable[[], None] | None = None) -> None:
        """Sends one more.

        Args:
            frame: whose place in the order is set here.
            taken: is called when the other side has it, or never will.
        """
        self._pushed += 1
        self._unsent.append(_Kept(frame._replace(sequence=self._pushed), taken))

    def batch(self, most_bytes: int) -> list[Frame]:
        """The next frames to send: one, or more of together not so many bytes."""
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
        """Whether a frame is new; one that has been heard before is not.

        Raises:
            MalformedError: one before it is missing.
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
        """The other side has all up to this one; returns whether messages of sites are among it.

        Raises:
            MalformedError: it was never sent.
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
        """A new stream: the other side has all up to this one, and needs the others again.

        Raises:
            MalformedError: it was never sent.
        """
        self.acknowledge(sequence)
        while self._unheard:
            self._unsent.appendleft(self._unheard.pop())

    def clear(self) -> None:
        """The other side will never hear of the rest."""
        for queue in (self._unheard, self._unsent):
            while queue:
                _let_go(queue.popleft())

    @property
    def has_unsent(self) -> bool:
        """Whether there is something to send."""
        return bool(self._unsent)

    @property
    def is_empty(self) -> bool:
        """Whether the other side has everything."""
        return not self._unsent and not self._unheard


def _let_go(kept: _Kept) -> None:
    if kept.taken is not None:
        kept.taken()
