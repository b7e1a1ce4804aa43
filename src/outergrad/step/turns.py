"""Which turn a step has on its transport: receives of the next one are posted in time.

A transport may send nothing before it has heard that the other side receives, and what waits for a
message cannot be taken back. So the messages of each step are kept apart by a number, its turn,
which all sites count alike; while a step is under way, receives for the next turn are posted, as if
that were a step of the same messages. If it is not, all sites leave out that turn.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_TURNS = 1 << 27
"""Behind them steps go without: no turn comes twice."""

_PER_STEP = 64
"""How many turns that were left out make it wait one more equal step."""


class Turns:
    """Counts the turns of one transport.

    What is posted for a turn that is left out stays with the transport. So the more there are of
    these, the more equal steps it takes to look ahead: of T steps at most about 8 √T leave one.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._lengths: object = None
        self._equal = self._left_out = 0
        self._is_ahead = False

    def begin(self, lengths: object) -> tuple[int, Sequence[int]]:
        """A step begins whose messages no other session's can come between.

        Args:
            lengths: equal where those of all its messages are; the same on all sites.

        Returns:
            Its turn, and those of which the receives are to be posted now, in this order.
        """
        if self._turn + 2 >= MOST_TURNS:
            return 0, ()
        follows = lengths == self._lengths
        if self._is_ahead and not follows:
            self._left_out += 1
        self._turn += 1 if follows else 2
        self._equal = self._equal + 1 if follows else 0
        posted = [self._turn] if self._is_ahead and follows else []
        self._lengths, self._is_ahead = lengths, self._equal > self._left_out // _PER_STEP
        wanted = range(self._turn, self._turn + 1 + self._is_ahead)
        return self._turn, [turn for turn in wanted if turn not in posted]
