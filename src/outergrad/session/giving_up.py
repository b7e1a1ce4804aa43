"""What a session does when its transport failed: it gives the group up, and says what holds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from outergrad.comm.standing import LastStep, Standing
from outergrad.core.errors import BoardGoneError, DriftError, ExchangeError, Failure, SiteLostError
from outergrad.core.model import Model
from outergrad.core.transport import Comm
from outergrad.record.stats import Stats
from outergrad.step import param_grad
from outergrad.step.agreement import Outcome
from outergrad.step.asking import all_made
from outergrad.step.brought import Brought
from outergrad.step.decision import Decision
from outergrad.step.groups import end_unfinished, give_up, note_lost, on_transport, refuse_lost
from outergrad.step.late_votes import LateVotes
from outergrad.step.lost import Findings, standing_of
from outergrad.step.mishaps import Mishaps
from outergrad.step.step import SharedStep

SETTLES_S = 0.5
"""How long the end of Python may wait for the word of others, whose group may be gone."""


class GivingUp:
    """The part of a session that is there for lost sites."""

    _comm: Comm
    _number: int
    """Fingerprint of the session, the same on all sites."""
    _stats: Stats
    _step: Any
    _model: Model
    _mishaps: Mishaps
    _votes: LateVotes

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Around what uses the transport.

        Raises:
            SiteLostError: it failed.
        """
        try:
            yield
        except ExchangeError as error:
            raise self._lost_by(error) from error

    def _lost_by(self, error: ExchangeError) -> SiteLostError:
        """Gives up: the transport failed, and its group must not be used again."""
        self._give_up(error)
        return self._lost_error()

    def _counts_elsewhere(self, step: Any, error: ExchangeError) -> bool:
        """Whether the step counts although a site was lost: some site that is left has made it.

        The next step raises.
        """
        counted = self._give_up(error)
        if counted and isinstance(step, SharedStep):
            step.settle(Decision.all_good(step.context.header))
        return counted

    def _note_end(self, *, counted: bool) -> None:
        """How far this session is, for sites that lose each other."""
        end = LastStep(self._stats.step, counted)
        on_transport(self._comm.key).note_end(self._number, end)

    def _give_up(self, error: ExchangeError) -> bool:
        outcome = self._find_out(error)
        found = self._taken(outcome) if outcome.content is not None else outcome.findings
        place = self._step.place if isinstance(self._step, SharedStep) else "the headers"
        number = self._stats.step + found.counted
        self._mishaps.lost(note_lost(self._comm, number, place, error, found))
        if not found.counted:
            param_grad.drop(self._model.params.values())
        return found.counted

    def _taken(self, outcome: Outcome) -> Findings:
        """Takes what a step brought that another site has made."""
        found, brought = outcome.findings, Brought.of(outcome.content)
        try:
            if brought is not None and brought.applied and isinstance(self._step, SharedStep):
                self._step.take(brought)
        except ValueError:
            brought = None
        if brought is None:
            told = "what the step brought cannot be read"
            known = {"counted": False, "certain": False, "may_differ": tuple(self._others)}
            return replace(found, **known, doubt=told)
        return replace(found, counted=brought.applied)

    def _lose_behind(self, error: ExchangeError, place: str) -> None:
        """Gives up behind a step that is over on all sites: its gradients stay, the next raises."""
        found = self._find_out(error).findings
        self._mishaps.lost(note_lost(self._comm, self._stats.step, place, error, found))

    def _find_out(self, error: ExchangeError) -> Outcome:
        voted = isinstance(self._step, SharedStep) and self._step.voted
        ends = on_transport(self._comm.key).ends
        standing = standing_of(error, self._stats.step, self._number, ends)
        outcome = give_up(self._comm, replace(standing, voted=voted))
        self._votes.forget()
        return outcome

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

    @property
    def _others(self) -> list[int]:
        return [site for site in range(self._comm.world_size) if site != self._comm.rank]

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

    def _require_group(self) -> None:
        """Ends steps of the group whose backward raised: after that all sites are in step.

        Raises:
            SiteLostError: the group must not be used any more.
        """
        end_unfinished(self._comm.key)
        self._refuse_lost()

    def _refuse_lost(self) -> None:
        self._hear_of_end()
        refuse_lost(self._comm.key)

    def _hear_of_end(self) -> None:
        """The others gave up while this site computed."""
        group = on_transport(self._comm.key)
        if group.pact.frozen and group.lost is None:
            error = ExchangeError("the other sites gave up", kind=Failure.CLOSED)
            self._lose_behind(error, "the others")

    def _lost_error(self) -> SiteLostError:
        lost = on_transport(self._comm.key).lost
        assert lost is not None
        return lost.again()
