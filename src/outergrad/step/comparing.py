"""The final comparison of what all sites have received in their last steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from outergrad.comm.standing import Standing
from outergrad.core.errors import BoardGoneError, ExchangeError, Failure
from outergrad.core.transport import Board, Comm
from outergrad.step.asking import ALL, MADE, Question, ask
from outergrad.step.digests import Digests
from outergrad.step.pact import Pact, is_in_trouble

WordOf = Callable[[int], Standing | None]
_POLL_S = 0.02
_SOON_S = 0.05
"""Seconds until the others are asked: sites that end together need not be."""


def heard_from_all(
    comm: Comm, pact: Pact, word_of: WordOf, limit_s: float, stays_s: float
) -> Digests:
    """Waits until all sites have made as many steps as this one.

    Args:
        comm: the transport, which has a board.
        pact: commit participant of this site.
        word_of: returns what a site left that ended in order after as many steps.
        limit_s: seconds that this may take.
        stays_s: seconds that the site with the board then waits until the others have read.

    Returns:
        Digests of what each site received in its last steps.

    Raises:
        ExchangeError: some site has not made them.
        BoardGoneError: the board is gone, before all of this was known.
    """
    board, began, is_asked = comm.board, time.monotonic(), False
    assert board is not None
    digests = pact.digests_of_all(comm)
    if digests.missing:
        digests.tell(board)
    while digests.missing:
        waited_s = time.monotonic() - began  # before looking: the process may be suspended
        gone = set(filter(board.is_gone, digests.missing))
        _look(digests, board, word_of)
        if late := gone.intersection(digests.missing):
            raise ExchangeError(Failure.CLOSED.value, sorted(late), kind=Failure.CLOSED)
        if digests.missing and waited_s > limit_s:
            raise ExchangeError(Failure.TIMEOUT.value, digests.missing, kind=Failure.TIMEOUT)
        if digests.missing and waited_s > _SOON_S and not is_asked:
            ask(board, Question(comm.rank, ALL, digests.made, MADE), pact.asked)
            is_asked = True
        if digests.missing:
            _refuse_trouble(board)
            time.sleep(_POLL_S)
    with suppress(BoardGoneError):  # all is known by now
        digests.say_read(board)
        if comm.holds_board:
            _stay(comm, board, digests, stays_s)
    return digests


def _look(digests: Digests, board: Board, word_of: WordOf) -> None:
    digests.look(board)
    for site in digests.missing:
        if (word := word_of(site)) is not None:
            digests.take(site, word.digests)


def _stay(comm: Comm, board: Board, digests: Digests, limit_s: float) -> None:
    """Waits until the others have read, because the board may end when this site goes on."""
    until = time.monotonic() + limit_s
    for site in (site for site in range(comm.world_size) if site != comm.rank):
        while not digests.is_read_by(board, site) and time.monotonic() < until:
            if is_in_trouble(board):
                return
            time.sleep(_POLL_S)


def _refuse_trouble(board: Board) -> None:
    if is_in_trouble(board):
        raise ExchangeError("the other sites gave up", kind=Failure.CLOSED)
