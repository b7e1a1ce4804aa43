"""Where a message belongs: to a collective of a line, on a stream."""

from __future__ import annotations

from dataclasses import dataclass

from outergrad.star.frames import Kind


@dataclass(frozen=True)
class Place:
    """Of a collective, the same on all sites.

    Attributes:
        kind: of its messages.
        lane: each has an order of its own.
        number: in its lane.
        dtype: of a sum, as in `sums.DTYPES`.
    """

    kind: Kind
    lane: int
    number: int
    dtype: int = 0


class Stream:
    """One stream of a line; when it ends, another takes its place."""

    def __init__(self) -> None:
        self.is_welcome = False
        """Whether the hub has answered."""
        self.is_over = False
