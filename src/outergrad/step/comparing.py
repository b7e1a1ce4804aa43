"""What sites tell each other of their last steps, on a board, and how it is compared."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

from outergrad.core.errors import ExchangeError, Failure
from outergrad.core.transport import Board, Comm
from outergrad.step.asking import ALL, MADE, Question, ask
from outergrad.step.pact import Pact, is_in_trouble

_POLL_S = 0.02
_SOON_S = 0.05
"""Sites that come to their end together need not be asked."""


def tell_made(board: Board, site: int, made: int, digests: Mapping[int, int]) -> None:
    """Says that a site has made so many steps, and what came in the last ones of each session."""
    board.put(_made_key(site, made), json.dumps({str(s): d for s, d in digests.items()}).encode())


def _digest(told: bytes, session: int) -> int | None:
    """What a site has said of a session; None if it did not, or it cannot be read."""
    try:
        return int(json.loads(told)[str(session)])
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


def _made_key(site: int, made: int) -> str:
    return f"made {made} {site}"


def all_made(
    comm: Comm, pact: Pact, session: int, is_done: Callable[[int], bool], limit_s: float
) -> dict[int, int | None]:
    """Waits until all sites have made as many steps as this one.

    Args:
        comm: the transport, which has a board.
        pact: what this site knows.
        session: whose steps are compared.
        is_done: whether a site has ended in order after as many steps, whatever came in them.
        limit_s: how long this may take.

    Returns:
        Of each site the digest of what came in the session's last steps, where it is known.

    Raises:
        ExchangeError: some site has not made them.
        BoardGoneError: the board is gone.
    """
    board, made, began, is_asked = comm.board, pact.made, time.monotonic(), False
    assert board is not None
    own = pact.digests_of(made)
    found = {comm.rank: own.get(session)}
    tell_made(board, comm.rank, made, own)
    while missing := [site for site in range(comm.world_size) if site not in found]:
        waited_s = time.monotonic() - began  # before it looks: it may be stopped between
        for site in missing:
            if (told := board.get(_made_key(site, made))) is not None:
                found[site] = _digest(told, session)
            elif is_done(site):
                found[site] = None
        missing = [site for site in missing if site not in found]
        if missing and waited_s > limit_s:
            raise ExchangeError(Failure.TIMEOUT.value, missing, kind=Failure.TIMEOUT)
        if waited_s > _SOON_S and not is_asked:
            ask(board, Question(comm.rank, ALL, made, MADE), pact.asked)
            is_asked = True
        if missing:
            _refuse_trouble(board)
            time.sleep(_POLL_S)
    return found


def _refuse_trouble(board: Board) -> None:
    if is_in_trouble(board):
        raise ExchangeError("the other sites gave up", kind=Failure.CLOSED)
