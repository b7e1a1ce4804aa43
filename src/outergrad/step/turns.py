"""Message sequence: sequence numbers of steps ("turns"), to post receives a step ahead.

A transport may send nothing before it has heard that the other side receives. So while a step is
under way, the receives of the next one are posted. They assume messages of the same lengths, or
those that a method with alternating payloads will have. A receive cannot be cancelled: therefore
the messages of each step are told apart by its turn. All sites count turns alike, from what they
have agreed on. A step whose messages have other lengths skips the expected turn.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_TURNS = 1 << 27
"""Turns in all, as none may come twice; receives of later steps are not posted ahead."""

_PER_STEP = 64
"""Skipped turns per additional equal step that must come before receives are posted ahead."""


class Turns:
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
