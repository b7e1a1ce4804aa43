"""What sites ask each other by way of a board, and where the answers stand."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outergrad.core.errors import ExchangeError, Failure
from outergrad.core.transport import Board, Comm
from outergrad.step.pact import Pact, is_in_trouble

ALL = -1
"""In place of a site: every other one is asked."""
MADE = -2
"""In place of a message's place: when has the site made so many steps?"""
_POLL_S = 0.02
_SOON_S = 0.05
"""Sites that come to their end together need not be asked."""


def asked_slot(number: int) -> str:
    """Where a site asks others for something; the next one takes the next number."""
    return f"asked {number}"


def answer_key(number: int) -> str:
    """Where it finds the answer."""
    return f"answer {number}"


@dataclass(frozen=True)
class Question:
    """What a site asks.

    Attributes:
        by: the site.
        of: which one is asked, or ALL.
        made: how many steps the one that asks has made.
        place: of the message that it asks for again in the next one, or MADE.
    """

    by: int
    of: int
    made: int
    place: int

    def text(self) -> str:
        """As it is written; another one of the same site is another text."""
        return json.dumps({**vars(self), "at": time.time_ns()})

    @staticmethod
    def of_text(text: str) -> Question | None:
        """What stands in a slot; None if it cannot be read."""
        try:
            asked = json.loads(text)
            return Question(*(int(asked[key]) for key in ("by", "of", "made", "place")))
        except (ValueError, TypeError, LookupError, RecursionError):
            return None


def ask(board: Board, question: Question, start: int) -> int:
    """Writes a question; returns its number.

    Args:
        board: where.
        question: which.
        start: all numbers below are taken.
    """
    text, number = question.text(), start
    while board.first(asked_slot(number), text) != text:
        number += 1
    return number


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
            is_over = is_done(site)  # before: it leaves this word before that of its end
            told = board.get(_made_key(site, made))
            if told is not None or is_over:
                found[site] = None if told is None else _digest(told, session)
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
