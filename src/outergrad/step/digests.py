"""What each site has received in its last steps, as they tell each other on a board."""

from __future__ import annotations

import json
from collections.abc import Mapping

from outergrad.core.transport import Board

_READ = "read"


class Digests:
    """Of all sites, once they have made so many steps.

    Each site writes its own on the board, reads those of the others, and writes that it has. The
    loop does so when its session settles, and the watcher when another site asks: so all have read
    them before the first of them ends, and the board maybe with it.

    Args:
        rank: this site.
        sites: how many there are.
        made: steps that this site has made.
        own: what it has received in the last of them, by session.

    Attributes:
        made: as above.
    """

    def __init__(self, rank: int, sites: int, made: int, own: Mapping[int, int]) -> None:
        self._rank, self._sites, self.made = rank, sites, made
        self._found = {rank: own}
        self._is_told = False

    @property
    def missing(self) -> list[int]:
        """Sites of which it is not known that they have made the steps."""
        return [site for site in range(self._sites) if site not in self._found]

    def tell(self, board: Board) -> None:
        """Says that this site has made the steps, and what it has received."""
        if not self._is_told:
            tell_made(board, self._rank, self.made, self._found[self._rank])
            self._is_told = True

    def look(self, board: Board) -> None:
        """Reads what the others have told so far."""
        for site in self.missing:
            if (told := board.get(_made_key(site, self.made))) is not None:
                self.take(site, _digests(told))

    def take(self, site: int, digests: Mapping[int, int]) -> None:
        """A site has told this, by session."""
        self._found[site] = digests

    def say_read(self, board: Board) -> None:
        """Says that this site has read those of all."""
        board.first(_read_slot(self._rank, self.made), _READ)

    def is_read_by(self, board: Board, site: int) -> bool:
        """Whether a site has said so."""
        return board.slot(_read_slot(site, self.made)) is not None

    def of(self, session: int) -> dict[int, int | None]:
        """Those of a session, by site; None where it did not tell."""
        return {site: digests.get(session) for site, digests in sorted(self._found.items())}


def tell_made(board: Board, site: int, made: int, digests: Mapping[int, int]) -> None:
    """Says that a site has made so many steps, and what came in the last ones of each session."""
    board.put(_made_key(site, made), json.dumps({str(s): d for s, d in digests.items()}).encode())


def _digests(told: bytes) -> dict[int, int]:
    """What a site has told; nothing, if it cannot be read."""
    try:
        return {int(session): int(digest) for session, digest in json.loads(told).items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def _made_key(site: int, made: int) -> str:
    return f"made {made} {site}"


def _read_slot(site: int, made: int) -> str:
    return f"read {made} {site}"
