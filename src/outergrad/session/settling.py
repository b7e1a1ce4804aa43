"""Final barrier of a session: all sites have made the last step, and have received the same."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from outergrad.comm.standing import Standing
from outergrad.core.errors import BoardGoneError, DriftError, ExchangeError, Failure, SiteLostError
from outergrad.session.giving_up import GivingUp
from outergrad.step.agreement import ANSWERS_S, STAYS_S
from outergrad.step.comparing import heard_from_all
from outergrad.step.lost import named


class Settling(GivingUp):
    """Base of a session that compares, after the last step, what the sites have received."""

    @property
    def _place(self) -> str:
        if self._step is None and not self._votes.is_settled:
            return f"the other sites' word on what they received in {self._votes.about}"
        return super()._place

    def _settle(self) -> None:
        """Waits until all sites have made the last step, and compares; one site can do so alone.

        Raises:
            SiteLostError: another site is lost, or what it received cannot be known.
            DriftError: sites have applied different things in the last step.
        """
        drift, patience_s = None, self._comm.patience_s
        if not self._votes.is_settled:
            with self._giving_up_behind(self._place):
                drift = self._count_at_end(2 * patience_s, patience_s)
        if drift is not None:
            raise drift

    def _count_at_end(self, limit_s: float, stays_s: float) -> DriftError | None:
        try:
            if self._votes.are_cast:
                return self._votes.count()
            return self._compare_at_end(limit_s, stays_s)
        except ExchangeError as error:
            if error.kind != Failure.CLOSED or not all(map(self._word_of, self._others)):
                raise
            return self._compare_at_end(limit_s, stays_s)  # by the farewells that all have left

    def _compare_at_end(self, limit_s: float, stays_s: float) -> DriftError | None:
        """Compares digests of the last step, on which the sites have not voted.

        `limit_s` is longer than the patience of a site: one that is behind may itself wait for a
        lost site, and aborts before this one does.
        """
        pact, limits = self._group.pact, (limit_s, stays_s)
        try:
            digests = heard_from_all(self._comm, pact, self._word_of, *limits)
        except BoardGoneError as error:
            raise self._uncompared(error) from error
        return self._votes.compare(digests.of(self._number))

    def _uncompared(self, error: BoardGoneError) -> ExchangeError:
        host = self._comm.host
        held = () if host in (None, self._comm.rank) else (host,)
        who = "".join(f", which site {site} usually holds" for site in held)
        told = f"{error}{who}, so that nothing can be compared"
        return ExchangeError(told, held, kind=Failure.LOCAL)

    def _word_of(self, site: int) -> Standing | None:
        """Returns the farewell of a site that ended in order, after as many steps as this one."""
        board, made = self._comm.board, self._group.pact.made
        try:
            text = None if board is None else board.farewell(site, self._number)
        except BoardGoneError:
            return None
        word = None if text is None else Standing.of(text)
        in_order = word is not None and word.made == made and word.ended == "session"
        return word if in_order else None

    # -- without raising --------------------------------------------------------------------------

    def settle_at_exit(self) -> None:
        """Settles when Python ends: warns instead of raising, and declares no site lost."""
        group = self._group
        if self._votes.is_settled or group.lost is not None or group.pact.frozen:
            return
        told: DriftError | RuntimeWarning | None
        about, compared = self._votes.about, self._votes.are_compared
        try:
            told = self._count_at_end(ANSWERS_S, min(STAYS_S, self._comm.patience_s))
        except ExchangeError as error:
            told = None if compared else self._unknown(about, error.sites, error)
        if told is not None:
            warnings.warn(str(told), RuntimeWarning, stacklevel=2)

    def _settle_at_end(self) -> DriftError | RuntimeWarning | None:
        """Settles when the session is detached; returns what to raise or to warn of, if anything.

        The other sites are told of a site that is lost meanwhile.
        """
        group = self._group
        is_known = group.lost is not None or self._votes.are_compared
        about = "" if is_known else self._votes.about
        try:
            if group.lost is None:
                self._hear_of_end()
            if group.lost is None:
                self._settle()
            if group.lost is not None:
                raise group.lost.again()
        except SiteLostError as error:
            return self._unknown(about, error.sites, error.__cause__) if about else None
        except DriftError as drift:
            return drift
        return None

    def _unknown(
        self, about: str, lost: Sequence[int], error: BaseException | None
    ) -> RuntimeWarning:
        why = "" if error is None else f" ({error})"
        return RuntimeWarning(
            f"site {self._comm.rank} lost {named(lost)} before the sites had compared what they "
            f"received in {about}{why}. It has made all steps, but a sum that was damaged in these "
            f"was not looked for: compare the models of the sites, or start again from the last "
            f"checkpoint"
        )
