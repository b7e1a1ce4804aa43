"""Which sites go on together: one slot of the board says it, and is written once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

GOING_ON = "going on"
"""Its name: who makes no more steps with these sites reads there with whom it goes on."""
COMING = "coming"
"""Another slot: sites that wait to be taken in, with blanks between their names."""
COME = "come"
"""Those of them that are."""


@dataclass(frozen=True)
class GoesOn:
    """What stands in the slot.

    Attributes:
        made: how many steps have been made till then.
        sites: ranks of those that go on.
        coming: names of those that take part besides from then on.
    """

    made: int
    sites: tuple[int, ...]
    coming: tuple[str, ...] = ()

    @staticmethod
    def proposed(made: int, sites: Iterable[int], coming: Iterable[str] = ()) -> str:
        """As a site proposes it."""
        return json.dumps([made, sorted(sites), list(coming)])

    @staticmethod
    def of(text: str, rank: int, made: int) -> GoesOn | None:
        """As it is read; None where it cannot be, or this site is none of them.

        Args:
            text: of the slot; other sites may write what they like.
            rank: this site.
            made: steps that it has made.
        """
        try:
            number, sites, coming = json.loads(text)
            found = GoesOn(int(number), tuple(map(int, sites)), tuple(map(str, coming)))
        except (ValueError, TypeError, RecursionError):
            return None
        return found if found.made == made and rank in found.sites else None
