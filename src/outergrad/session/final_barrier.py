"""The barrier after the last step: all sites have made it, and have received the same."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from functools import partial

from outergrad.commit.agreement import ANSWERS_S, STAYS_S
from outergrad.commit.board_io import performed
from outergrad.commit.digests import AllHaveMade
from outergrad.commit.lost import named
from outergrad.core.errors import BoardGoneError, DriftError, ExchangeError, Failure, SiteLostError
from outergrad.session.core import Core
from outergrad.session.failure import FailureHandler


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
        if not self._votes.are_over:
            with self._failure.guard_between(self._failure.place):
                drift = self._settled(2 * patience_s, patience_s)
        if drift is not None:
            raise drift

    def settle_with_all(self) -> None:
        """Waits for all sites, before some of them leave for another transport."""
        patience_s = self._at.comm.patience_s
        drift = self._settled(2 * patience_s, patience_s)
        self._votes.meet(partial(self._heard, 2 * patience_s, patience_s))
        if drift is not None:
            raise drift

    def settle_at_exit(self) -> None:
        """Compares when Python ends, where other sites may have left: it aborts nothing."""
        group = self._at.group
        if self._votes.are_over or group.lost is not None or group.participant.frozen:
            return
        told: DriftError | RuntimeWarning | None
        about, compared = self._votes.about, self._votes.are_compared
        try:
            told = self._settled(ANSWERS_S, min(STAYS_S, self._at.comm.patience_s))
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

    def _settled(self, limit_s: float, stays_s: float) -> DriftError | None:
        """Settles the last step, by the farewells of sites that have left if all have.

        A late site may itself wait for a lost one, and aborts before this site does.

        Args:
            limit_s: seconds that this may take.
            stays_s: seconds that the site with the board then waits until the others have read.
        """
        compare = partial(self._heard, limit_s, stays_s)
        try:
            return self._votes.settle(compare)
        except ExchangeError as error:
            if error.kind != Failure.CLOSED or not self._are_all_known():
                raise
            return self._votes.settle_without_votes(compare)

    def _heard(self, limit_s: float, stays_s: float) -> dict[int, int | None]:
        """Waits until all sites have made the last step; returns what each received in it."""
        at, comm, participant = self._at, self._at.comm, self._at.group.participant
        digests = participant.digests_of_all(comm)
        own = digests, comm.rank, comm.world_size, participant.asked
        barrier = AllHaveMade(*own, time.monotonic)
        assert comm.board is not None
        try:
            passed = barrier.passed(limit_s, stays_s if comm.holds_board else None)
            performed(comm.board, passed, at.number)
        except BoardGoneError as error:
            if digests.missing:  # else the watcher has read the last ones meanwhile
                raise self._uncompared(error) from error
        return digests.of(at.number)

    def _uncompared(self, error: BoardGoneError) -> ExchangeError:
        host = self._at.comm.host
        held = () if host in (None, self._at.comm.rank) else (host,)
        who = "".join(f", which {self._at.comm.sites[site].called} usually holds" for site in held)
        told = f"{error}{who}, so that nothing can be compared"
        return ExchangeError(told, held, kind=Failure.LOCAL)

    def _are_all_known(self) -> bool:
        """True if the digests of all are there; the board may end before these are asked again."""
        comm = self._at.comm
        if comm.board is None:
            return False
        digests = self._at.group.participant.digests_of_all(comm)
        performed(comm.board, digests.take_farewells(), self._at.number)
        return not digests.missing

    def _unknown(
        self, about: str, lost: Sequence[int], error: BaseException | None
    ) -> RuntimeWarning:
        """Returns a warning that the last steps were not compared."""
        comm, why = self._at.comm, "" if error is None else f" ({error})"
        sites = comm.sites
        return RuntimeWarning(
            f"{sites[comm.rank].called} lost {named(sites, lost)} before the sites had compared "
            f"what they received in {about}{why}. It has made all steps, but a sum that was "
            f"damaged in these was not looked for: compare the models of the sites, or start again "
            f"from the last checkpoint"
        )
