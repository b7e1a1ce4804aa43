"""Failure of the transport: the session aborts it, and reports which steps count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from outergrad.commit.agreement import Outcome
from outergrad.commit.ballot import Decision
from outergrad.commit.lost import Findings, standing_of
from outergrad.commit.step_result import StepResult
from outergrad.core.errors import ExchangeError, Failure, SiteLostError, SitesChangedError
from outergrad.session.core import Core
from outergrad.session.running_step import SyncedStep
from outergrad.step import param_grad
from outergrad.step.transport_state import give_up, note_lost


class FailureHandler:
    """Aborts a session's transport together with the other sites.

    All sites agree on whether the last step counts (`commit/agreement.py`). What they found goes
    into the error that the training loop gets.

    Args:
        core: the session's.
    """

    def __init__(self, core: Core) -> None:
        self._at, self._running, self._ranks = core.at, core.running, core.ranks
        self._votes, self._mishaps = core.exchange.votes, core.mishaps
        self._parameters = core.exchange.model.params.values()

    # -- around calls of the transport ----------------------------------------------------------

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Guards calls of the transport during a step.

        Raises:
            SiteLostError: the transport failed.
        """
        try:
            yield
        except ExchangeError as error:
            raise self.lost_by(error) from error

    @contextmanager
    def guard_between(self, place: str) -> Iterator[None]:
        """Guards calls of the transport between two steps.

        Where the remaining sites continue, the next step raises instead.

        Args:
            place: what this site waits for, in words.

        Raises:
            SiteLostError: the transport failed, and sites cannot continue.
        """
        try:
            yield
        except ExchangeError as error:
            self.lose_between(error, place)
            if self._at.group.untold is None:
                raise self.error() from error

    def lost_by(self, error: ExchangeError) -> SiteLostError | SitesChangedError:
        """Aborts the transport; returns the error for the training loop."""
        self.abort(error)
        return self.error()

    def error(self) -> SiteLostError | SitesChangedError:
        """Returns the error for the training loop, once the transport was aborted."""
        group = self._at.group
        told, group.untold = group.untold, None
        assert group.lost is not None
        return group.lost.again() if told is None else told

    # -- aborting -------------------------------------------------------------------------------

    def abort(self, error: ExchangeError) -> bool:
        """Aborts the transport during a step; returns whether the step counts."""
        place, outcome = self.place, self._find_out(error)
        found = self._taken(outcome) if outcome.content is not None else outcome.findings
        self._note_lost(place, error, found)
        if not found.counted:
            param_grad.drop(self._parameters)
        if (step := self._running.shared) is not None:
            step.clear()
        return found.counted

    def abort_and_settle(self, step: SyncedStep, error: ExchangeError) -> bool:
        """Aborts the transport; True if a remaining site has made the step, so that it counts.

        The next step raises then.
        """
        counted = self.abort(error)
        if counted:
            step.settle(Decision.all_good(step.context.header))
        return counted

    def lose_between(self, error: ExchangeError, place: str) -> None:
        """Aborts the transport after a step that is over on all sites: its gradients stay."""
        self._note_lost(place, error, self._find_out(error).findings)

    def poll_abort(self) -> None:
        """Notes that the other sites aborted while this one computed."""
        if self._at.group.participant.frozen and not self._at.is_lost:
            error = ExchangeError("the other sites gave up", kind=Failure.CLOSED)
            self.lose_between(error, "the others")

    @property
    def place(self) -> str:
        """Words for what this site waits for."""
        if self._running.step is None and not self._votes.are_over:
            return f"the other sites' word on what they received in {self._votes.about}"
        step = self._running.shared
        return "the headers" if step is None else step.place

    def tell_part(self, step: int, *, counted: bool = False) -> None:
        """Tells the transport in which unvoted steps before this one the site took part."""
        first = self._votes.first
        if counted and first is None:
            first = step - 1
        if first is not None and first < step:
            self._at.comm.took_part(self._at.number, first, step - 1)

    def _note_lost(self, place: str, error: ExchangeError, found: Findings) -> None:
        at = self._at
        step = at.stats.step + found.counted
        at.lose(step)
        self.tell_part(step, counted=found.counted)
        self._mishaps.lost(note_lost(at.comm, step, place, error, found))

    def _find_out(self, error: ExchangeError) -> Outcome:
        step, at = self._running.shared, self._at
        standing = standing_of(error, at.stats.step, at.number, at.group.ends, at.comm.mesh)
        outcome = give_up(at.comm, replace(standing, voted=step is not None and step.voted))
        self._votes.forget()
        return outcome

    def _taken(self, outcome: Outcome) -> Findings:
        """Applies the result of a step that another site has made and this one lacks."""
        found, brought = outcome.findings, StepResult.of(outcome.content)
        step = self._running.shared
        try:
            if brought is not None and brought.applied and step is not None:
                step.take(brought)
        except ValueError:
            brought = None
        if brought is None:
            self._stay_behind()
            known = {"counted": False, "certain": False, "may_differ": tuple(self._at.others)}
            return replace(found, **known, doubt="what the step brought cannot be read")
        return replace(found, counted=brought.applied)

    def _stay_behind(self) -> None:
        """Leaves the remaining sites, which may continue without this one."""
        participant = self._at.group.participant
        opens, participant.opens = participant.opens, None
        if opens is not None:
            with suppress(RuntimeError):
                opens().close()
