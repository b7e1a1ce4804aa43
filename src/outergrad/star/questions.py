"""A site's questions to the hub, and the hub's answers."""

from __future__ import annotations

from outergrad.star.frames import Frame


class Questions:
    """The questions of one site; callers hold the lock of the line."""

    def __init__(self) -> None:
        self._last = 0
        self._answers: dict[int, bytes | None] = {}

    def count(self) -> int:
        """Returns a number that no other question of this site has."""
        self._last += 1
        return self._last

    def begin(self) -> int:
        """Begins a question; returns the number under which its answer is awaited."""
        number = self.count()
        self._answers[number] = None
        return number

    def take(self, frame: Frame) -> None:
        """Takes an answer; ignores it if no thread waits for it any more."""
        if frame.number in self._answers:
            self._answers[frame.number] = bytes(frame.payload)

    def is_answered(self, number: int) -> bool:
        """True if the answer has come."""
        return self._answers[number] is not None

    def end(self, number: int) -> bytes | None:
        """Ends a question; returns its answer, or None if it has not come."""
        return self._answers.pop(number)
