"""The groups of sites of a run, each with a lane of its own, which their members open by name."""

from __future__ import annotations

from collections.abc import Sequence

from outergrad.star.frames import LANES, MalformedError

_MOST_GROUPS = 1 << 12
"""Most groups of a run."""
_LONGEST_NAME = 1 << 9
_SEPARATOR = b"\n"


def asked_for(name: str, ranks: Sequence[int]) -> bytes:
    """Returns the question for the lane of a group: its name, and the ranks of its sites."""
    return name.encode() + _SEPARATOR + " ".join(map(str, ranks)).encode()


class Groups:
    """The groups of one run. Which sites a group has, says the first that opens it.

    Args:
        sites: number of sites of the run.
    """

    def __init__(self, sites: int) -> None:
        self._sites = sites
        self._lanes: dict[bytes, int] = {}
        self._members: list[tuple[int, ...]] = []

    def answer(self, question: bytes, asker: int) -> bytes:
        """Opens a group, if no other site has; returns its lane, or else why there is none.

        Args:
            question: as `asked_for` makes it.
            asker: rank of the site that asks.

        Raises:
            MalformedError: the question names no group that this site could be in.
        """
        name, _, told = question.partition(_SEPARATOR)
        ranks = self._read(told)
        if len(name) > _LONGEST_NAME or asker not in ranks:
            raise MalformedError("a group that cannot be, or that the site is not in")
        lane = self._lanes.get(name)
        if lane is None:
            if len(self._members) == _MOST_GROUPS:
                return f"a run has at most {_MOST_GROUPS} groups".encode()
            lane = self._lanes[name] = LANES + len(self._members)
            self._members.append(ranks)
        if (first := self.members(lane)) != ranks:
            opened = " ".join(map(str, first))
            return f"other sites have opened it with other members, the ranks {opened}".encode()
        return str(lane).encode()

    def _read(self, told: bytes) -> tuple[int, ...]:
        try:
            ranks = tuple(map(int, told.split()))
        except ValueError:
            raise MalformedError("a group whose members cannot be read") from None
        if list(ranks) != sorted(set(ranks)) or not all(0 <= r < self._sites for r in ranks):
            raise MalformedError("a group of members that are no sites of the run")
        return ranks

    def members(self, lane: int) -> tuple[int, ...]:
        """Returns the ranks of the sites that use a lane.

        Raises:
            MalformedError: there is no such lane.
        """
        if lane < LANES:
            return tuple(range(self._sites))
        if lane >= LANES + len(self._members):
            raise MalformedError(f"a frame of lane {lane}, which no group has")
        return self._members[lane - LANES]
