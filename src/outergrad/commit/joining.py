"""The join barrier: all sites agree on the step before which others join.

These are generators that yield requests to the board, as the agreement is, so that the model of the
protocol (`outergrad_lab.checking`) runs them on a board of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from outergrad.commit.agreement import Outcome
from outergrad.commit.board_requests import Asking, First, Gone, Rest, Slot
from outergrad.commit.lost import Findings
from outergrad.commit.machine import Action
from outergrad.commit.membership_record import COME, COMING, GOING_ON, MembershipRecord
from outergrad.core.errors import BoardGoneError, ExchangeError, Failure

_DIGITS, _MOST_APART = 20, 3
"""Limits of a reported step count: digits, and steps apart from this site's. Sites are one step
apart at most, and may have reported one step ago."""


class Joining(Protocol):
    """The part of a site's commit machine that this barrier drives."""

    @property
    def made(self) -> int:
        """Number of steps that this site has made."""
        ...

    def come(self) -> int:
        """Others wait to join. Returns the step count to tell."""
        ...

    def set_join(self, told: int, coming: Sequence[str]) -> None:
        """All have told their step counts; `told` is the greatest."""
        ...

    def begin(self) -> tuple[Action, ...]:
        """A step is to begin. Returns `PAUSE` if it must not yet, `JOIN` if others join before."""
        ...


def hear_of_coming(site: Joining, rank: int, sites: int) -> Asking[bool]:
    """Tells this site's step count if others wait to join; sets the step once all have told.

    Returns:
        Whether others wait.

    Args:
        site: this site.
        rank: its rank.
        sites: number of sites.
    """
    waiting = yield Slot(COMING)
    if not waiting:
        return False
    yield First(_said_by(rank), str(site.come()))
    told = list[int | None]()
    for other in range(sites):
        told.append(_number((yield Slot(_said_by(other))), site.made))
    numbers = [number for number in told if number is not None]
    if len(numbers) == sites:  # else the loop raises when it has waited for long enough
        coming = yield First(COME, waiting)
        site.set_join(max(numbers), coming.split())
    return True


def is_join_due(
    site: Joining, sites: int, patience_s: float, clock: Callable[[], float]
) -> Asking[bool]:
    """Returns True if others join before the next step; waits until that is known.

    Raises:
        ExchangeError: it does not become known: a site is gone, or late.
    """
    until = clock() + patience_s
    while Action.PAUSE in (actions := site.begin()):
        gone = list[int]()
        for other in range(sites):
            if (yield Gone(other)):
                gone.append(other)
        if gone and (yield Slot(GOING_ON)) is None:  # else they have gone on with the new sites
            raise ExchangeError(Failure.CLOSED.value, gone, kind=Failure.CLOSED)
        if clock() >= until:
            told = "the sites do not agree on when others take part"
            raise ExchangeError(told, kind=Failure.LOCAL)
        yield Rest(until)
    return Action.JOIN in actions


def joined(made: int, rank: int, sites: int, coming: Sequence[str]) -> Asking[Outcome]:
    """Proposes to go on with all sites and those that come; returns what the first one proposed."""
    try:
        text = yield First(GOING_ON, MembershipRecord.proposed(made, range(sites), coming))
    except BoardGoneError as error:
        return Outcome(Findings((), doubt=str(error)))
    return Outcome(Findings(()), goes_on=MembershipRecord.of(text, rank, made))


def _number(said: str | None, made: int) -> int | None:
    """Parses a step count that a site reports; None if it is impossible."""
    is_number = said is not None and said.isdecimal() and len(said) < _DIGITS
    number = int(said) if said is not None and is_number else None
    return number if number is not None and abs(number - made) <= _MOST_APART else None


def _said_by(site: int) -> str:
    return f"made when others came {site}"
