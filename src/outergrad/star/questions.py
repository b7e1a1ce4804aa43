"""What a site has asked the hub, and what the hub has answered."""

from __future__ import annotations

from outergrad.star.frames import Frame


class Questions:
    """Of one site. Whoever calls its methods holds the lock of the line."""

    def __init__(self) -> None:
        self._last = 0
        self._answers: dict[int, bytes | None] = {}

    def count(self) -> int:
        """A number that nothing else has."""
        self._last += 1
        return self._last

    def begin(self) -> int:
        """One more: its number, under which the answer is awaited."""
        number = self.count()
        self._answers[number] = None
        return number

    def take(self, frame: Frame) -> None:
        """An answer; to what nobody waits for any more it is forgotten."""
        if frame.number in self._answers:
            self._answers[frame.number] = bytes(frame.payload)

    def is_answered(self, number: int) -> bool:
        """Whether the answer is there."""
        return self._answers[number] is not None

    def end(self, number: int) -> bytes | None:
        """The answer, if it is there; nobody waits for it any more."""
        return self._answers.pop(number)
