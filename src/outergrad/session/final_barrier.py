"""The barrier after the last step: all sites have made it, and have received the same."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

from outergrad.comm.failure_report import FailureReport
from outergrad.commit.agreement import ANSWERS_S, STAYS_S
from outergrad.commit.digests import Digests
from outergrad.commit.lost import named
from outergrad.commit.participant import CommitParticipant, is_in_trouble
from outergrad.commit.peer_requests import ALL, MADE, Question, ask
from outergrad.core.errors import BoardGoneError, DriftError, ExchangeError, Failure, SiteLostError
from outergrad.core.transport import Board, Comm
from outergrad.session.core import Core
from outergrad.session.failure import FailureHandler

WordOf = Callable[[int], FailureReport | None]
_POLL_S = 0.02
_SOON_S = 0.05
"""Seconds until the others are asked: sites that end together need not be."""


def heard_from_all(
    comm: Comm, participant: CommitParticipant, word_of: WordOf, limit_s: float, stays_s: float
) -> Digests:
    """Waits until all sites have made as many steps as this one.

    Args:
        comm: the transport, which has a board.
        participant: commit participant of this site.
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
    digests = participant.digests_of_all(comm)
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
            ask(board, Question(comm.rank, ALL, digests.made, MADE), participant.asked)
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


class FinalBarrier:
    """Waits until the last step is known to be the same on all sites.

    Args:
        core: the session's.
        failure: aborts the transport if it fails.
    """

    def __init__(self, core: Core, failure: FailureHandler) -> None:
        self._at, self._votes, self._failure = core.at, core.exchange.votes, failure

    def settle(self) -> None:
        """Waits until all sites have made the last step; one site can call this alone.

        Raises:
            SiteLostError: another site is lost, or what it received cannot be known.
            DriftError: sites have applied different gradients in the last step.
        """
        drift, patience_s = None, self._at.comm.patience_s
        if not self._votes.is_settled:
            with self._failure.guard_between(self._failure.place):
                drift = self._counted(2 * patience_s, patience_s)
        if drift is not None:
            raise drift

    def settle_with_all(self) -> None:
        """Waits for all sites, before some of them leave for another transport."""
        drift, patience_s = None, self._at.comm.patience_s
        if not self._votes.is_settled:
            drift = self._counted(2 * patience_s, patience_s)
        self._compared(2 * patience_s, patience_s)
        if drift is not None:
            raise drift

    def settle_at_exit(self) -> None:
        """Compares when Python ends, where other sites may have left: it aborts nothing."""
        group = self._at.group
        if self._votes.is_settled or group.lost is not None or group.participant.frozen:
            return
        told: DriftError | RuntimeWarning | None
        about, compared = self._votes.about, self._votes.are_compared
        try:
            told = self._counted(ANSWERS_S, min(STAYS_S, self._at.comm.patience_s))
        except ExchangeError as error:
            told = None if compared else self._unknown(about, error.sites, error)
        if told is not None:
            warnings.warn(str(told), RuntimeWarning, stacklevel=2)

    def settle_at_end(self) -> DriftError | RuntimeWarning | None:
        """Compares when the session ends; returns an error or a warning for the user."""
        group = self._at.group
        is_known = group.lost is not None or self._votes.are_compared
        about = "" if is_known else self._votes.about
        try:
            if group.lost is None:
                self._failure.poll_abort()
            if group.lost is None:
                self.settle()
            if group.lost is not None:
                raise group.lost.again()
        except SiteLostError as error:
            return self._unknown(about, error.sites, error.__cause__) if about else None
        except DriftError as drift:
            return drift
        return None

    def _counted(self, limit_s: float, stays_s: float) -> DriftError | None:
        """Counts the votes on the last step, or compares its digests if there are none."""
        try:
            if self._votes.are_cast:
                return self._votes.count()
            return self._compared(limit_s, stays_s)
        except ExchangeError as error:
            if error.kind != Failure.CLOSED or not all(map(self._word_of, self._at.others)):
                raise
            return self._compared(limit_s, stays_s)  # by the farewells of sites that have left

    def _compared(self, limit_s: float, stays_s: float) -> DriftError | None:
        """Compares digests of a last step on which nobody has voted.

        A late site may itself wait for a lost one, and aborts before this site does.
        """
        at = self._at
        try:
            digests = heard_from_all(at.comm, at.group.participant, self._word_of, limit_s, stays_s)
        except BoardGoneError as error:
            raise self._uncompared(error) from error
        return self._votes.compare(digests.of(at.number))

    def _uncompared(self, error: BoardGoneError) -> ExchangeError:
        host = self._at.comm.host
        held = () if host in (None, self._at.comm.rank) else (host,)
        who = "".join(f", which site {site} usually holds" for site in held)
        told = f"{error}{who}, so that nothing can be compared"
        return ExchangeError(told, held, kind=Failure.LOCAL)

    def _word_of(self, site: int) -> FailureReport | None:
        """Returns the farewell of a site that ended in order, after as many steps as this one."""
        board, made = self._at.comm.board, self._at.group.participant.made
        try:
            text = None if board is None else board.farewell(site, self._at.number)
        except BoardGoneError:
            return None
        word = None if text is None else FailureReport.of(text)
        in_order = word is not None and word.made == made and word.ended == "session"
        return word if in_order else None

    def _unknown(
        self, about: str, lost: Sequence[int], error: BaseException | None
    ) -> RuntimeWarning:
        """Returns a warning that the last steps were not compared."""
        why = "" if error is None else f" ({error})"
        return RuntimeWarning(
            f"site {self._at.comm.rank} lost {named(lost)} before the sites had compared what they "
            f"received in {about}{why}. It has made all steps, but a sum that was damaged in these "
            f"was not looked for: compare the models of the sites, or start again from the last "
            f"checkpoint"
        )
