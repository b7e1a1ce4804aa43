"""Membership record: a board slot, written once, that says which sites go on together."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

GOING_ON = "going on"
"""Slot of the record: a site that makes no more steps reads there with which sites it goes on."""
COMING = "coming"
"""Slot with the names of sites that wait for admission, separated by blanks."""
COME = "come"
"""Slot with the names of the waiting sites that are admitted."""


@dataclass(frozen=True)
class MembershipRecord:
    """Content of the membership record.

    Attributes:
        made: number of steps made before the change.
        sites: ranks of the sites that go on.
        coming: names of the sites that join from then on.
    """

    made: int
    sites: tuple[int, ...]
    coming: tuple[str, ...] = ()

    @staticmethod
    def proposed(made: int, sites: Iterable[int], coming: Iterable[str] = ()) -> str:
        """Returns the text with which a site proposes a membership."""
        return json.dumps([made, sorted(sites), list(coming)])

    @staticmethod
    def of(text: str, rank: int, made: int) -> MembershipRecord | None:
        """Parses the record; None if it cannot be read, or this site does not go on.

        Args:
            text: text of the slot; other sites may write what they like.
            rank: rank of this site.
            made: number of steps that it has made.
        """
        try:
            number, sites, coming = json.loads(text)
            found = MembershipRecord(int(number), tuple(map(int, sites)), tuple(map(str, coming)))
        except (ValueError, TypeError, RecursionError):
            return None
        return found if found.made == made and rank in found.sites else None
