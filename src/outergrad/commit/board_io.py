"""Performs the requests that the protocols of this room yield, on a board."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from outergrad.commit.board_requests import (
    Asking,
    Farewell,
    First,
    Get,
    Gone,
    Put,
    Request,
    Rest,
    Slot,
    T,
)
from outergrad.core.errors import BoardGoneError
from outergrad.core.transport import Board

_POLL_S = 0.02


def performed(board: Board, asking: Asking[T], session: int = 0) -> T:
    """Runs a protocol: sends it the board's answers to its requests. Returns its result.

    Args:
        board: the board.
        asking: the protocol; a `BoardGoneError` is thrown into it where it asks.
        session: fingerprint of the session whose farewells are read.
    """
    try:
        request = next(asking)
        while True:
            try:
                answer = _answer(board, request, session)
            except BoardGoneError as error:
                request = asking.throw(error)
            else:
                request = asking.send(answer)
    except StopIteration as end:
        return end.value


def _answer(board: Board, request: Request, session: int) -> Any:
    answers: dict[type, Callable[[Any], Any]] = {
        First: lambda one: board.first(one.key, one.text),
        Slot: lambda one: board.slot(one.key),
        Put: lambda one: board.put(one.key, one.content),
        Get: lambda one: board.get(one.key),
        Farewell: lambda one: board.farewell(one.site, session),
        Gone: lambda one: board.is_gone(one.site),
        Rest: lambda one: time.sleep(_POLL_S),
    }
    return answers[type(request)](request)
