"""How a session settles: all sites have made the last step, and have received the same."""

from __future__ import annotations

import warnings
from contextlib import suppress

from outergrad.comm.standing import Standing
from outergrad.core.errors import BoardGoneError, DriftError, ExchangeError, Failure, SiteLostError
from outergrad.session.giving_up import GivingUp
from outergrad.step.comparing import all_made
from outergrad.step.groups import on_transport

SETTLES_S = 0.5
"""How long the end of Python may wait for the word of others, whose group may be gone."""


class Settling(GivingUp):
    """The part of a session that comes behind its last step."""

    def _settle(self) -> None:
        """Waits until all sites have made the last step; one site can do so alone.

        Raises:
            SiteLostError: another site is lost.
            DriftError: sites have applied different things in the last step.
        """
        drift = None
        if not self._votes.is_settled:
            with self._giving_up():
                drift = self._count_at_end(2 * self._comm.patience_s)
        if drift is not None:
            raise drift

    def _count_at_end(self, limit_s: float) -> DriftError | None:
        try:
            return self._votes.count() if self._votes.are_cast else self._compare_at_end(limit_s)
        except ExchangeError as error:
            if error.kind != Failure.CLOSED or not all(map(self._is_done, self._others)):
                raise
            self._votes.forget()
            return None

    def _compare_at_end(self, limit_s: float) -> DriftError | None:
        """Hears from the others that they have made the last step, on which nobody has voted.

        One that is late may itself wait for a site that is lost, and gives up before this one does.
        Where the board is gone, its host is: the next step will say so.
        """
        pact = on_transport(self._comm.key).pact
        try:
            digests = all_made(self._comm, pact, self._number, self._is_done, limit_s)
        except BoardGoneError:
            digests = {self._comm.rank: None}
        return self._votes.compare(digests)

    def _is_done(self, site: int) -> bool:
        """Whether a site has ended in order, after as many steps as this one."""
        board, made = self._comm.board, on_transport(self._comm.key).pact.made
        try:
            text = None if board is None else board.farewell(site, self._number)
        except BoardGoneError:
            return False
        word = None if text is None else Standing.of(text)
        return word is not None and word.made == made and word.ended == "session"

    def settle_at_exit(self) -> None:
        """The same when Python ends, where others may have gone: it gives nobody up."""
        group = on_transport(self._comm.key)
        if self._votes.is_settled or group.lost is not None or group.pact.frozen:
            return
        with suppress(ExchangeError):
            drift = self._count_at_end(SETTLES_S)
            if drift is not None:
                warnings.warn(str(drift), RuntimeWarning, stacklevel=2)

    def _settle_at_end(self) -> DriftError | None:
        """The same when the session ends: who is lost then, the others are told."""
        group = on_transport(self._comm.key)
        try:
            if group.lost is None:
                self._refuse_lost()
                self._settle()
        except SiteLostError:
            return None
        except DriftError as drift:
            return drift
        return None
