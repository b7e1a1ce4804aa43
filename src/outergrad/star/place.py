"""The identity of a collective on a line, and the state of a stream."""

from __future__ import annotations

from dataclasses import dataclass

from outergrad.star.frames import Kind


@dataclass(frozen=True)
class Place:
    """The identity of a collective, the same on all sites.

    Attributes:
        kind: kind of its messages.
        lane: each lane has its own order.
        number: index of the collective in its lane.
        dtype: of a sum, as an index into `sums.DTYPES`.
    """

    kind: Kind
    lane: int
    number: int
    dtype: int = 0


class Stream:
    """One stream of a line, which another replaces when it ends."""

    def __init__(self) -> None:
        self.is_welcome = False
        """True if the hub has answered."""
        self.is_over = False
