"""Failure handling of a session: it aborts its transport, and finds out whether a step counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from outergrad.comm.standing import LastStep
from outergrad.core.errors import ExchangeError, Failure, SiteLostError, SitesChangedError
from outergrad.core.model import Model
from outergrad.core.transport import Comm
from outergrad.record.stats import Stats
from outergrad.step import param_grad
from outergrad.step.agreement import Outcome
from outergrad.step.brought import Brought
from outergrad.step.decision import Decision
from outergrad.step.groups import Sessions, end_unfinished, give_up, note_lost, refuse_lost
from outergrad.step.late_votes import LateVotes
from outergrad.step.lost import Findings, standing_of
from outergrad.step.mishaps import Mishaps
from outergrad.step.step import SharedStep


class GivingUp:
    """Base of a session that handles the loss of other sites."""

    _comm: Comm
    _group: Sessions
    """All sessions on the transport."""
    _number: int
    """Fingerprint of the session, the same on all sites."""
    _stats: Stats
    _step: Any
    _model: Model
    _mishaps: Mishaps
    _votes: LateVotes
    _lost_step: int | None = None
    """Number of synchronised steps before the one in which sites were lost; None if none were."""

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Aborts the group if the transport fails inside the block.

        Raises:
            SiteLostError: the transport failed.
            SitesChangedError: it failed, and sites go on without those that were lost.
        """
        try:
            yield
        except ExchangeError as error:
            raise self._lost_by(error) from error

    def _lost_by(self, error: ExchangeError) -> SiteLostError | SitesChangedError:
        """Aborts the group, which must not be used again, and returns the error to raise."""
        self._give_up(error)
        return self._lost_error()

    def _counts_elsewhere(self, step: Any, error: ExchangeError) -> bool:
        """Aborts the group; True if another site has made the step. Then the next step raises."""
        counted = self._give_up(error)
        if counted and isinstance(step, SharedStep):
            step.settle(Decision.all_good(step.context.header))
        return counted

    @contextmanager
    def _giving_up_behind(self, place: str) -> Iterator[None]:
        """Aborts the group if the transport fails inside the block, between two steps.

        Where sites go on without those that were lost, the next step raises `SitesChangedError`.

        Args:
            place: what this site waits for, in words.

        Raises:
            SiteLostError: the transport failed, and sites cannot go on.
        """
        try:
            yield
        except ExchangeError as error:
            self._lose_behind(error, place)
            if self._group.untold is None:
                raise self._lost_error() from error

    @property
    def _place(self) -> str:
        """Description, for error messages, of what this site waits for."""
        step = self._in_full()
        return step.place if isinstance(step, SharedStep) else "the headers"

    def _note_end(self, *, counted: bool) -> None:
        """Records the session's last step, for the failure reports to other sites."""
        end = LastStep(self._stats.step, counted)
        self._group.note_end(self._number, end)

    def _give_up(self, error: ExchangeError) -> bool:
        place, outcome = self._place, self._find_out(error)
        found = self._taken(outcome) if outcome.content is not None else outcome.findings
        self._note_lost(place, error, found)
        if not found.counted:
            param_grad.drop(self._model.params.values())
        return found.counted

    def _taken(self, outcome: Outcome) -> Findings:
        """Applies the step result that another site has put on the board."""
        found, brought = outcome.findings, Brought.of(outcome.content)
        try:
            if brought is not None and brought.applied and isinstance(self._step, SharedStep):
                self._step.take(brought)
        except ValueError:
            brought = None
        if brought is None:
            told = "what the step brought cannot be read"
            self._stay_behind()
            known = {"counted": False, "certain": False, "may_differ": tuple(self._others)}
            return replace(found, **known, doubt=told)
        return replace(found, counted=brought.applied)

    def _tell_part(self, step: int, *, counted: bool = False) -> None:
        """Tells the transport of the steps before `step` that the sites have not voted on.

        With `counted` the last of them may count by another site's step result.
        """
        first = self._votes.first
        if counted and first is None:
            first = step - 1
        if first is not None and first < step:
            self._comm.took_part(self._number, first, step - 1)

    def _stay_behind(self) -> None:
        """Lets the others go on without this site, if they do: opens and closes their transport."""
        pact = self._group.pact
        opens, pact.opens = pact.opens, None
        if opens is not None:
            with suppress(RuntimeError):
                opens().close()

    def _lose_behind(self, error: ExchangeError, place: str) -> None:
        """Aborts after a step that is over on all sites; gradients stay, the next step raises."""
        self._note_lost(place, error, self._find_out(error).findings)

    def _note_lost(self, place: str, error: ExchangeError, found: Findings) -> None:
        """Records the first step that does not count; tells the transport of the steps before."""
        step = self._lost_step = self._stats.step + found.counted
        self._tell_part(step, counted=found.counted)
        self._mishaps.lost(note_lost(self._comm, step, place, error, found))

    def _in_full(self) -> Any:
        """Returns the running step, as one that can apply another site's step result."""
        return self._step

    def _find_out(self, error: ExchangeError) -> Outcome:
        self._in_full()
        ends = self._group.ends
        standing = standing_of(error, self._stats.step, self._number, ends, self._comm.mesh)
        outcome = give_up(self._comm, replace(standing, voted=self._has_voted()))
        self._votes.forget()
        return outcome

    def _has_voted(self) -> bool:
        """True if other sites may have applied the running step, or this rank's share of it."""
        return isinstance(self._step, SharedStep) and self._step.voted

    @property
    def _others(self) -> list[int]:
        return [site for site in range(self._comm.world_size) if site != self._comm.rank]

    def _require_group(self) -> None:
        """Ends the group's steps whose backward raised, so that all sites are in step again.

        Raises:
            SiteLostError: the group must not be used any more.
        """
        end_unfinished(self._comm.key)
        self._refuse_lost()

    def _refuse_lost(self) -> None:
        self._hear_of_end()
        while self._group.pact.opens is not None:  # more sites may be lost meanwhile
            self._go_on()
        refuse_lost(self._comm.key)

    def _go_on(self) -> None:
        raise NotImplementedError

    def _hear_of_end(self) -> None:
        """Aborts if the other sites did so while this site computed."""
        group = self._group
        if group.pact.frozen and group.lost is None:
            error = ExchangeError("the other sites gave up", kind=Failure.CLOSED)
            self._lose_behind(error, "the others")

    def _lost_error(self) -> SiteLostError | SitesChangedError:
        group = self._group
        told, group.untold = group.untold, None
        assert group.lost is not None
        return group.lost.again() if told is None else told
