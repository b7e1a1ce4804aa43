"""The work that follows a step: its figures, hooks of others, the next forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from outergrad.buckets.bucket import StepContext
from outergrad.capture.claims import HeldHooks, with_any
from outergrad.core.errors import ExchangeError
from outergrad.core.sent import StepTap
from outergrad.core.transform import Telling
from outergrad.record.stats import Stats
from outergrad.session.choosing import Choosing
from outergrad.session.core import Core
from outergrad.session.failure import FailureHandler
from outergrad.session.running_step import SyncedStep


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of a backward pass, for whatever follows it.

    Attributes:
        gradients: parameters whose gradients are final now, so that their hooks may run.
        shared: parameters whose gradients are the mean over the sites.
        applied: True if the step was shared and counts.
        is_own: True if the gradients are this site's alone, and others have their own.
    """

    gradients: Collection[str]
    shared: Collection[str] = frozenset()
    applied: bool = False
    is_own: bool = False


Follower = Callable[[StepOutcome], None]


class Aftermath:
    """Notes the decision of a shared step, its figures, and what the next forward does.

    Args:
        core: the session's.
        failure: aborts the transport if it fails.
        choosing: measures steps for a chooser of methods; None without one.
        tap: is told of steps that count; None without one.
    """

    def __init__(
        self,
        core: Core,
        failure: FailureHandler,
        choosing: Choosing | None,
        tap: StepTap | None = None,
    ) -> None:
        self._tap = tap
        self._exchange, self._at, self._failure = core.exchange, core.at, failure
        self._reporter, self._mishaps, self._choosing = core.reporter, core.mishaps, choosing

    def follow(self, step: SyncedStep) -> None:
        """Continues with what a shared step has chosen, and reports it."""
        if step.choice is None:
            return
        exchange, at = self._exchange, self._at
        if exchange.next_forward.follow(step.units, step.choice):
            exchange.chosen.update(zip(step.units, step.choice.reasons, strict=True))
        applied = step.applied
        if step.decision is None:
            at.stats = step.stats(self._steps_after_void())
        else:
            at.stats = step.stats(at.stats.step + 1)
            at.note_end(counted=applied)
        if applied and self._tap is not None:
            self._tap.ended(step.context.header.step)
        if applied and not self._reporter.is_silent:
            self._reporter.report(step.context, at.stats)
        if step.decision is not None and self._choosing is not None:
            self._measure(step.context)
        if applied:
            self._tell()
        if exchange.transform is None:
            exchange.next_forward.let_rest(exchange.compressors.counting)

    def follow_alone(self) -> None:
        """Notes and reports the step of a single site."""
        at = self._at
        at.stats = Stats(at.stats.step + 1, total_sent_bytes=at.stats.total_sent_bytes)
        self._reporter.report_alone(at.stats)

    def note(self, step: SyncedStep) -> None:
        """Counts and reports a step that does not count.

        Raises:
            BadStepsError: too many in a row had gradients that are not finite.
        """
        if step.decision is None:
            return
        if step.drift is not None:
            self._mishaps.drifted(step.context.header.step, step.drift.sites, "")
        else:
            self._mishaps.decided(step.decision, step.subjects)

    def _steps_after_void(self) -> int:
        """Returns the count of steps; a void one, behind which others continue, does not count."""
        at = self._at
        continues = at.lost_step is not None and at.group.participant.opens is not None
        return at.stats.step if continues else at.stats.step + 1

    def _tell(self) -> None:
        """Adds up over the sites what a transform tells, unless the next step raises."""
        transform, comm = self._exchange.transform, self._at.comm
        if not isinstance(transform, Telling) or self._at.is_lost:
            return
        own = transform.tell()
        if own is None:
            return
        try:
            total = comm.all_reduce(own.to(comm.device)).wait()
        except ExchangeError as error:
            self._failure.lose_between(error, "what the transforms of the other sites tell")
        else:
            transform.hear(total)

    def _measure(self, context: StepContext) -> None:
        """Tells the chooser how long the step took, unless the next step raises."""
        if self._choosing is None or self._at.is_lost:
            return
        try:
            trial = self._choosing.ended(context.header.step, context.headers)
        except ExchangeError as error:
            self._failure.lose_between(error, "what the other sites say of their steps")
        else:
            if trial is not None:
                self._reporter.trial(trial)


class HookRunner:
    """Calls post-accumulate hooks of others, which were held until gradients are final.

    Args:
        core: the session's.
        hooks: returns the held hooks of every parameter, by name.
        watching: returns a context in which optimizers' steps are no steps of the loop.
    """

    def __init__(
        self,
        core: Core,
        hooks: Callable[[], Mapping[str, HeldHooks]],
        watching: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._at, self._tentative = core.at, core.tentative
        self._hooks, self._watching = hooks, watching

    def run(self, outcome: StepOutcome) -> None:
        """Calls the hooks, in the same order on every site.

        Raises:
            RuntimeError: a hook applied a gradient of this site alone.
        """
        if not outcome.gradients:
            return
        spent = self._run(outcome.gradients)
        if spent and outcome.is_own:
            raise RuntimeError(
                f"{spent[0]!r} or its gradient was used up by a post-accumulate hook (an optimizer "
                f"in backward) inside session.no_sync(), where the gradient is that of "
                f"{self._at.me.called} alone: the sites are no replicas any more; start again "
                f"without no_sync()"
            )

    def _run(self, gradients: Iterable[str]) -> list[str]:
        hooks, names = self._hooks(), set(gradients)
        hooked = [name for name in reversed(with_any(hooks)) if name in names]
        with self._watching():
            spent = [name for name in hooked if hooks[name].run()]
        self._tentative.used(spent)
        return spent
