"""How far the sites' clocks are apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outergrad.tools.doctor.board import Board
from outergrad.tools.doctor.findings import Finding, note, ok, warning

_QUESTIONS = 6
_APART_S = 2.0
_CLOSE_S = 0.1

Clock = Callable[[], float]


@dataclass(frozen=True)
class Offset:
    """How far a site's clock is ahead of site 0's.

    Attributes:
        seconds: Best guess; negative where it is behind.
        uncertain_s: By how much the guess may be wrong.
    """

    seconds: float
    uncertain_s: float

    def __str__(self) -> str:
        if abs(self.seconds) >= _APART_S:
            return f"{self.seconds:+,.1f} s ± {self.uncertain_s:.1f} s"
        return f"{1e3 * self.seconds:+.1f} ms ± {1e3 * self.uncertain_s:.1f} ms"


def measure_offset(board: Board, ranks: Sequence[int], clock: Clock = time.time) -> Offset | None:
    """Asks site 0 for the time; site 0 answers every site in turn.

    The answer was given some time between question and receipt: the quickest of several is
    believed, and half of what it took is the uncertainty.

    Args:
        board: Where the sites meet.
        ranks: All that are there.
        clock: Seconds since 1970.

    Returns:
        This site's offset; None at site 0, or if there was no answer.
    """
    if board.rank == 0:
        for rank in ranks[1:]:
            _answer(board, rank, clock)
        return None
    try:
        board.wait("clock", [board.rank], 15.0 * len(ranks))
        offsets = [_ask(board, turn, clock) for turn in range(_QUESTIONS)]
    except (TimeoutError, RuntimeError):
        return None
    return min(offsets, key=lambda offset: offset.uncertain_s)


def _answer(board: Board, rank: int, clock: Clock) -> None:
    board.post(f"clock/{rank}", "ask")
    for turn in range(_QUESTIONS):
        try:
            board.await_note(f"question/{rank}/{turn}")
        except TimeoutError:
            return
        board.post(f"answer/{rank}/{turn}", clock())


def _ask(board: Board, turn: int, clock: Clock) -> Offset:
    asked_s = clock()
    board.post(f"question/{board.rank}/{turn}", "what time is it?")
    board.await_note(f"answer/{board.rank}/{turn}")
    heard_s = clock()
    answer_s = board.read(f"answer/{board.rank}/{turn}")
    return Offset((asked_s + heard_s) / 2 - answer_s, (heard_s - asked_s) / 2)


def check_clocks(offsets: Mapping[int, Offset | None]) -> list[Finding]:
    """Which clocks are wrong, as seen from site 0.

    Args:
        offsets: Of every site but site 0.
    """
    findings = [finding for rank, o in offsets.items() if (finding := _check(rank, o))]
    if findings:
        return findings
    within_s = max((abs(o.seconds) + o.uncertain_s for o in offsets.values() if o), default=0.0)
    return [ok("clocks", f"all within {1e3 * within_s:.1f} ms of site 0's")]


def _check(rank: int, offset: Offset | None) -> Finding | None:
    if offset is None:
        return note("clocks", f"site {rank}'s was not measured: it did not answer in time")
    ahead = "ahead of" if offset.seconds > 0 else "behind"
    apart_s = abs(offset.seconds)
    if apart_s - offset.uncertain_s > _APART_S:
        return warning(
            "clocks",
            f"site {rank} is {apart_s:,.1f} s {ahead} site 0: training does not mind, but logs "
            "cannot be compared and certificates may be refused",
            "set the clock by the network, as with `timedatectl set-ntp true`",
        )
    if apart_s - offset.uncertain_s > _CLOSE_S:
        said = f"site {rank} is {apart_s:.1f} s {ahead} site 0: seen in logs alone"
        return note("clocks", said)
    return None
