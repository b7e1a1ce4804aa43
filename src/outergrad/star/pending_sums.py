"""The sums of a run for which the hub has the parts of some sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from outergrad.star.frames import ALL, LANES, Frame, MalformedError
from outergrad.star.sums import called, refuse_if_none

_Place = tuple[int, int, int]
"""Lane, number and offset of a part."""
_MOST_BYTES = 1 << 29
"""Most bytes of one site that wait for other sites, in the lanes of all its groups."""


class _Shape(NamedTuple):
    """Everything in which the parts of a sum have to agree."""

    dtype: int
    total: int
    length: int
    recipient: int

    def told(self, names: Sequence[str]) -> str:
        to = "" if self.recipient == ALL else f" for {names[self.recipient]}"
        return f"{self.total} bytes of {called(self.dtype)}{to}"


class PendingSums:
    """Parts of sums, until those of all sites of the lane have come."""

    def __init__(self) -> None:
        self._parts: dict[_Place, dict[int, Frame]] = {}
        self._nbytes: Counter[int] = Counter()

    def take(self, frame: Frame, members: Sequence[int]) -> list[Frame] | None:
        """Keeps a part; returns all parts in rank order once the last one has come.

        Raises:
            MalformedError: the site has sent this part before, or nothing that can be added up.
        """
        place = frame.lane, frame.number, frame.offset
        refuse_if_none(len(frame.payload), frame.dtype)
        parts = self._parts.setdefault(place, {})
        if frame.sender in parts:
            raise MalformedError("a part of a sum for the second time")
        parts[frame.sender] = frame
        self._nbytes[frame.sender] += len(frame.payload)
        if self._nbytes[frame.sender] > _MOST_BYTES:
            raise MalformedError(f"parts of sums of more than {_MOST_BYTES} bytes")
        return self._popped(place) if len(parts) == len(members) else None

    def _popped(self, place: _Place) -> list[Frame]:
        parts = self._parts.pop(place)
        for sender, part in parts.items():
            self._nbytes[sender] -= len(part.payload)
        return [parts[rank] for rank in sorted(parts)]

    def without(self, gone: int, members_of: Callable[[int], Sequence[int]]) -> list[list[Frame]]:
        """Drops and returns the parts of the groups' sums to which a site that is gone adds none.

        Args:
            gone: rank of the site.
            members_of: returns the ranks of the sites that use a lane.
        """
        hopeless = [
            place
            for place, parts in self._parts.items()
            if place[0] >= LANES and gone not in parts and gone in members_of(place[0])
        ]
        return [self._popped(place) for place in hopeless]

    def late(self, lane: int, number: int, members: Sequence[int]) -> list[int]:
        """Returns the sites whose parts of a sum are missing, of those parts that others sent."""
        waiting = [p for place, p in self._parts.items() if place[:2] == (lane, number)]
        return [rank for rank in members if any(rank not in parts for parts in waiting)]

    def has(self, frame: Frame, rank: int) -> bool:
        """True if a site has sent its part of the same sum."""
        return rank in self._parts.get((frame.lane, frame.number, frame.offset), {})


def disagreement(parts: Sequence[Frame], names: Sequence[str]) -> tuple[str, list[int]] | None:
    """Returns why parts are no parts of one sum, and whose differ from the majority's; else None.

    Args:
        parts: of all sites of the lane.
        names: of all sites of the run.
    """
    shapes = [_shape(part) for part in parts]
    usual, count = Counter(shapes).most_common(1)[0]
    if count == len(parts):
        return None
    is_most = 2 * count > len(parts)
    others = [part for part in parts if not is_most or _shape(part) != usual]
    said = "; ".join(f"{names[part.sender]} sent {_shape(part).told(names)}" for part in others)
    most = f", where the others sent {usual.told(names)}" if is_most else ""
    why = f"the sites do not agree on sum {parts[0].number}: {said}{most}"
    return why, [part.sender for part in others]


def _shape(part: Frame) -> _Shape:
    return _Shape(part.dtype, part.total, len(part.payload), part.recipient)
