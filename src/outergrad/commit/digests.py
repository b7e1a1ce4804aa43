"""Digests of what each site has received in its last steps, exchanged on a board."""

from __future__ import annotations

import json
from collections.abc import Mapping

from outergrad.core.transport import Board

_READ = "read"


class Digests:
    """Digests of all sites, after the same number of steps.

    Each site writes its own digests to the board, reads those of the others, and then writes that
    it has read them. The loop does so in its final barrier, and the watcher when another site asks.
    So all have read them before the first site ends, which may end the board.

    Args:
        rank: rank of this site.
        sites: number of sites.
        made: number of steps that this site has made.
        own: digest of what it received in the last of them, by session.

    Attributes:
        made: number of steps, as above.
    """

    def __init__(self, rank: int, sites: int, made: int, own: Mapping[int, int]) -> None:
        self._rank, self._sites, self.made = rank, sites, made
        self._found = {rank: own}
        self._is_told = False

    @property
    def missing(self) -> list[int]:
        """Sites that are not known to have made the steps."""
        return [site for site in range(self._sites) if site not in self._found]

    def tell(self, board: Board) -> None:
        """Publishes that this site has made the steps, with its digests."""
        if not self._is_told:
            tell_made(board, self._rank, self.made, self._found[self._rank])
            self._is_told = True

    def look(self, board: Board) -> None:
        """Reads what the others have published so far."""
        for site in self.missing:
            if (told := board.get(_made_key(site, self.made))) is not None:
                self.take(site, _digests(told))

    def take(self, site: int, digests: Mapping[int, int]) -> None:
        """Records the digests of a site, by session."""
        self._found[site] = digests

    def say_read(self, board: Board) -> None:
        """Publishes that this site has read the digests of all."""
        board.first(_read_slot(self._rank, self.made), _READ)

    def is_read_by(self, board: Board, site: int) -> bool:
        """True if a site has published that it has read the digests of all."""
        return board.slot(_read_slot(site, self.made)) is not None

    def of(self, session: int) -> dict[int, int | None]:
        """Returns the digests of a session by site; None for a site that published none."""
        return {site: digests.get(session) for site, digests in sorted(self._found.items())}


def tell_made(board: Board, site: int, made: int, digests: Mapping[int, int]) -> None:
    """Publishes that a site has made `made` steps, with the digest of each session's last ones."""
    board.put(_made_key(site, made), json.dumps({str(s): d for s, d in digests.items()}).encode())


def _digests(told: bytes) -> dict[int, int]:
    """Parses published digests; empty if they cannot be read."""
    try:
        return {int(session): int(digest) for session, digest in json.loads(told).items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def _made_key(site: int, made: int) -> str:
    return f"made {made} {site}"


def _read_slot(site: int, made: int) -> str:
    return f"read {made} {site}"
