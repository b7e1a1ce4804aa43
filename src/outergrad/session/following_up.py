"""Work after a step: the session follows what was chosen and decided, and reports it."""

from __future__ import annotations

from typing import Any

from outergrad.buckets.bucket import StepContext
from outergrad.core.errors import ExchangeError
from outergrad.core.model import Compressors
from outergrad.core.reasons import Reason
from outergrad.core.transform import GradientTransform
from outergrad.core.types import Unit
from outergrad.session.choosing import Choosing
from outergrad.session.next_forward import NextForward
from outergrad.session.reporting import Reporter
from outergrad.session.settling import Settling
from outergrad.step.repeated import Pattern
from outergrad.step.step import SharedStep


class FollowingUp(Settling):
    """Base of a session that does what follows a step."""

    _compressors: Compressors
    _next_forward: NextForward
    _chosen: dict[Unit, Reason]
    _reporter: Reporter
    _choosing: Choosing | None
    _transform: GradientTransform | None
    _pattern: Pattern | None

    def _take_note(self, step: Any) -> None:
        """Records the sites' decision on a step: bad, discarded or drifted ones are reported."""
        if not isinstance(step, SharedStep) or step.decision is None:
            return
        if step.drift is not None:
            self._mishaps.drifted(step.context.header.step, step.drift.sites, "")
        else:
            self._mishaps.decided(step.decision, step.subjects.names)

    def _follow_up(self, step: SharedStep) -> None:
        if step.choice is None:
            return
        if self._next_forward.follow(step.units, step.choice):
            self._chosen.update(zip(step.units, step.choice.reasons, strict=True))
        self._stats = step.stats(self._steps_with(step))
        if step.decision is not None:
            self._note_end(counted=step.applied)
        if step.applied:
            self._reporter.report(step.context, self._stats)
        if self._choosing is not None and step.decision is not None:
            self._measure(self._choosing, step.context)
        if self._transform is None:
            self._next_forward.let_rest(self._compressors.counting)
        self._pattern = self._pattern_of(step)

    def _steps_with(self, step: SharedStep) -> int:
        """Counts the steps with this one, unless sites were lost in it and others go on."""
        is_void = step.decision is None and self._lost_step is not None
        if is_void and self._group.pact.opens is not None:
            return self._stats.step
        return self._stats.step + 1

    def _pattern_of(self, step: SharedStep) -> Pattern | None:
        raise NotImplementedError

    def _measure(self, choosing: Choosing, context: StepContext) -> None:
        """Tells a chooser how long the step took; after a loss, which the next step raises, not."""
        if self._group.lost is not None:
            return
        try:
            trial = choosing.ended(context.header.step, context.headers)
        except ExchangeError as error:
            self._lose_behind(error, "what the other sites say of their steps")
        else:
            if trial is not None:
                self._reporter.trial(trial)
