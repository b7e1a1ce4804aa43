"""Repeated steps: steps of a session that reuse the plan and the buckets of the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outergrad.capture.engine import NO_TASK
from outergrad.capture.weighting import Weighting
from outergrad.messages.header import Join
from outergrad.planning.plan import Planner
from outergrad.session.following_up import FollowingUp
from outergrad.step.buffers import SharedBuffers
from outergrad.step.cadence import Cadence
from outergrad.step.header_builder import HeaderBuilder
from outergrad.step.joint import JointParts
from outergrad.step.pact import Pact
from outergrad.step.repeated import Pattern, RepeatedStep
from outergrad.step.step import SharedStep


def _nothing(name: str) -> None:
    """Default of `Repeating.on_counted`, for when no repeated step runs."""


class Repeating(FollowingUp):
    """Base of a session that repeats a step without planning it anew.

    Attributes:
        on_counted: tells the repeated step that runs which parameter is ready.
    """

    _joint: JointParts | None
    """Modules whose outputs' deltas are averaged over the sites; None if there are none."""
    _planner: Planner
    _cadence: Cadence
    _buffers: SharedBuffers
    _weighting: Weighting
    _join: Join
    _header_builder: HeaderBuilder
    _synchronise: bool
    counted_task = NO_TASK
    """Autograd's task id of the backward of the repeated step that runs; else NO_TASK."""
    meets_hooks = False
    """True if a backward has met hooks of others, which are still to be called."""
    _unshared: set[str]

    def __init__(self) -> None:
        self.on_counted: Callable[[str], None] = _nothing

    def _repeated(self, task: int, used: set[str]) -> RepeatedStep | None:
        """Begins a repeated step; None if anything may differ from the last step."""
        pattern, pact, number = self._pattern, self._pact(), self._stats.step
        if pattern is None or pact is None or not self._synchronise or used != pattern.used:
            return None
        alone = len(self._group.attached) == 1
        plain = alone and not self._unshared and self._join == Join.NONE
        told = not self._reporter.is_silent and self._reporter.is_due(number)
        quiet = not (told or self._buffers.is_written())
        if not (plain and quiet and self._planner.repeats(pattern.choice, pattern.known, number)):
            return None
        if not (pattern.rests and self._next_forward.rests) and not self._header_builder.uses_as(
            pattern.own, used
        ):
            return None
        step = RepeatedStep(pattern, task, number, pact, self._votes, self._group.turns)
        self._group.running.append(self)
        self.counted_task, self.on_counted = task, step.on_ready
        return step

    def _in_full(self) -> Any:
        """Returns the running step; a repeated one goes on, messages and all, as a `SharedStep`."""
        step = self._step
        if isinstance(step, RepeatedStep):
            self._group.running.remove(self)
            self._pattern, self.counted_task, self.on_counted = None, NO_TASK, _nothing
            self._step = self._synchronised(step.task, set(step.used), before=step)
        return self._step

    def _succeeds(self, step: RepeatedStep) -> bool:
        try:
            return step.succeeds()
        except BaseException:  # such as KeyboardInterrupt
            self._comm.take_turn(0)
            full = self._in_full()
            self._close(full)
            self._take_note(full)
            raise

    def _synchronised(self, task: int, used: set[str], **more: Any) -> Any:
        raise NotImplementedError

    def _require_step(self) -> None:
        raise NotImplementedError

    def _close(self, step: Any) -> None:
        raise NotImplementedError

    def end_unfinished(self, *, unless: int) -> None:
        """Ends a step whose backward raised here, so that all sites are in step again."""
        raise NotImplementedError

    def _pact(self) -> Pact | None:
        """Returns the commit participant of this site; None if the transport has no board."""
        if self._comm.board is None:
            return None
        return self._group.pact

    def _pattern_of(self, step: SharedStep) -> Pattern | None:
        """Returns what the next steps can reuse of this one; None if they cannot repeat it."""
        changes = self._transform is not None or self._joint is not None or self._model.blocks
        if changes or not (step.applied and self._cadence.always and self._weighting.is_even):
            return None
        layers = self._next_forward.layers
        rests = all(layer.is_known(k) for layer in layers for k, _ in enumerate(layer.slots))
        return Pattern.of(step, self._planner.header_cache.known, rests=rests)

    def _finish_repeated(self, step: RepeatedStep) -> None:
        self._group.running.remove(self)
        self._step, self.counted_task, self.on_counted = None, NO_TASK, _nothing
        for layer in () if self._next_forward.rests else self._next_forward.layers:
            layer.forget_awaited()
            layer.forget_untapped()
        self._planner.commit(applied=True)
        self._cadence.passes += 1
        self._stats = step.stats(self._stats.step + 1)
        self._note_end(counted=True)
        if not self._reporter.is_silent:
            self._reporter.report(step.context, self._stats)
        self._mishaps.counted()
        if self._choosing is not None:
            self._measure(self._choosing, step.context)
            self._next_forward.let_rest(self._compressors.counting)
