"""Turns: sequence numbers of steps, by which receives are posted a step ahead.

A transport may send nothing before it has heard that the other side receives. So while a step is
under way, the receives of the next one are posted, as if its messages had the same lengths, or
those that a method which sends this and that in turns will have. A receive cannot be cancelled:
therefore the messages of each step are told apart by its turn. All sites count turns alike, from
what they have agreed on. A step whose messages have other lengths leaves out the turn that was
expected.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_TURNS = 1 << 27
"""Later steps have none, since no turn may come twice; their receives are not posted ahead."""

_PER_STEP = 64
"""After how many turns that were left out one more equal step must come before it looks ahead."""


class Turns:
    """Counts the turns of the steps on one transport.

    Receives that were posted for a turn that is left out stay with the transport for ever. So the
    more there are of these, the more equal steps must come before it looks ahead again: of T steps
    at most about 8 sqrt(T) leave a turn out.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._expected: object = None
        self._equal = self._left_out = 0
        self._is_ahead = False

    def begin(self, lengths: object, ahead: object = None) -> tuple[int, Sequence[int]]:
        """A step begins whose messages do not mix with those of other sessions.

        Args:
            lengths: what the lengths of all its messages follow from, the same on all sites.
            ahead: what those of the next step are expected to follow from; None for the same.

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
