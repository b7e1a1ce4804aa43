"""Peer requests: questions that sites ask each other on the board, and slots of the answers."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from outergrad.commit.board_io import performed
from outergrad.commit.board_requests import Asking, First
from outergrad.core.errors import BoardGoneError, ExchangeError, Failure
from outergrad.core.transport import Board, Comm

ALL = -1
"""Sentinel for `Question.of`: every other site is asked."""
MADE = -2
"""Sentinel for `Question.place`: report when `made` steps are made."""
_POLL_S = 0.02


def asked_slot(number: int) -> str:
    """Slot of a request; the next request takes the next number."""
    return f"asked {number}"


def answer_key(number: int) -> str:
    """Board key of the answer to a request."""
    return f"answer {number}"


@dataclass(frozen=True)
class Question:
    """Request of a site to another one, or to all.

    Attributes:
        by: site that asks.
        of: site that is asked, or ALL.
        made: number of steps that the asking site has made.
        place: index of the message, in the next step, that is requested again; or MADE.
    """

    by: int
    of: int
    made: int
    place: int

    def text(self) -> str:
        """Returns its JSON text, made unique by the time."""
        return json.dumps({**vars(self), "at": time.time_ns()})

    @staticmethod
    def of_text(text: str) -> Question | None:
        """Parses the text of a slot; None if it cannot be read."""
        try:
            asked = json.loads(text)
            return Question(*(int(asked[key]) for key in ("by", "of", "made", "place")))
        except (ValueError, TypeError, LookupError, RecursionError):
            return None


def asking(question: Question, start: int) -> Asking[int]:
    """Writes a request to the board; returns its number.

    Args:
        question: the request.
        start: all numbers below are taken.
    """
    text, number = question.text(), start
    while (yield First(asked_slot(number), text)) != text:
        number += 1
    return number


def sent_again(comm: Comm, question: Question, start: int, nbytes: int) -> bytes:
    """Requests a message of another site once more, and waits for it.

    Args:
        comm: the transport, which has a board.
        question: the request.
        start: all numbers of requests below are taken.
        nbytes: bytes of the message.

    Raises:
        ExchangeError: it does not come, or the board is gone.
    """
    board, until = comm.board, time.monotonic() + comm.patience_s
    assert board is not None
    try:
        number = ask(board, question, start)
        while time.monotonic() < until:
            content = board.get(answer_key(number))
            if content is not None and len(content) == nbytes:
                return content
            time.sleep(_POLL_S)
    except BoardGoneError as error:
        raise ExchangeError(str(error), kind=Failure.LOCAL) from error
    told = f"a message of {comm.sites[question.of].called} was damaged, and it sent none again"
    raise ExchangeError(told, (question.of,), kind=Failure.TIMEOUT)


def ask(board: Board, question: Question, start: int) -> int:
    """Writes a request to this board, as `asking` does."""
    return performed(board, asking(question, start))
