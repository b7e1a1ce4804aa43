"""Agreements on a board of one process, whose clock runs by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outergrad.comm.failure_report import FailureReport
from outergrad.commit.agreement import Agreement, word_slot
from outergrad.commit.board_requests import Farewell, First, Get, Gone, Put, Rest, Slot

MADE = 5


class Board:
    """Slots that are written once, farewells, and a clock that each rest moves on."""

    def __init__(self, slots: dict[str, str], farewells: dict[int, str]) -> None:
        self._slots, self._farewells, self._kept = dict(slots), farewells, dict[str, Any]()
        self.now = 0.0

    def answer(self, request: Any) -> Any:
        match request:
            case First(key, text):
                return self._slots.setdefault(key, text)
            case Slot(key):
                return self._slots.get(key)
            case Put(key, content):
                self._kept[key] = content
            case Get(key):
                return self._kept.get(key)
            case Farewell(site):
                return self._farewells.get(site)
            case Gone():
                return False
            case Rest():
                self.now += 0.02
        return None


def reached(board: Board, word: FailureReport) -> Any:
    kept = {MADE: "the step"}.get
    agreement = Agreement(0, 3, None, 60.0, word, kept, lambda: board.now, lambda: None, digest=str)
    asking = agreement.reach()
    try:
        request = next(asking)
        while True:
            request = asking.send(board.answer(request))
    except StopIteration as end:
        return end.value


@pytest.mark.parametrize("ended", ["process", "session"])
@pytest.mark.parametrize("behind", [0, 1])
def test_nobody_waits_for_the_word_of_a_site_that_has_ended(behind, ended):
    """Its farewell says how far it came, and it reads no board any more."""
    word = FailureReport(step=MADE, session=7, made=MADE, gone=(2,))
    farewell = replace(word, made=MADE - behind, gone=(), ended=ended, why="Ctrl-C")
    board = Board({word_slot(1): word.text(), "made 1": str(MADE)}, {2: farewell.text()})
    findings = reached(board, word).findings
    assert board.now < 0.5
    assert findings.lost == (2,)
    assert findings.certain
    assert findings.may_differ == ((2,) if behind else ())


def test_a_site_that_lives_is_waited_for():
    word = FailureReport(step=MADE, session=7, made=MADE, gone=(2,))
    farewell = replace(word, gone=(), ended="process")
    board = Board({word_slot(1): word.text()}, {2: farewell.text()})
    findings = reached(board, word).findings
    assert board.now == pytest.approx(30.0, abs=0.1)
    assert findings.may_differ == (1,)
