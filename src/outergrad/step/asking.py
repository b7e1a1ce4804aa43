"""What sites ask each other by way of a board, and where the answers stand."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from outergrad.core.transport import Board

ALL = -1
"""In place of a site: every other one is asked."""
MADE = -2
"""In place of a message's place: when has the site made so many steps?"""


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
