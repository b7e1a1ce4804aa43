"""The events of autograd become steps: one for every backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from outergrad.capture.backward_listeners import FailedBackward, now
from outergrad.capture.changes import Change, ModelWatch, overwritten
from outergrad.capture.engine import (
    NO_TASK,
    at_end_of_backward,
    current_task,
    in_distributed_autograd,
    refuse_nested_backward,
    untraced,
)
from outergrad.capture.optimizer_steps import held
from outergrad.capture.parameters import WatchedParameter, accumulating
from outergrad.capture.past_autograd import PastAutograd
from outergrad.capture.tapped_layer import TappedLayer
from outergrad.core.blocks import Block
from outergrad.core.errors import BudgetSpentError, ExchangeError, StepDiscardedError
from outergrad.core.types import Factors, Slot
from outergrad.messages.header import Join
from outergrad.replay.block_use import Use
from outergrad.session.after_step import Aftermath, Follower, StepOutcome
from outergrad.session.core import Core
from outergrad.session.elastic import Elastic
from outergrad.session.failure import FailureHandler
from outergrad.session.running_step import Step, SyncedStep
from outergrad.session.transform_checks import refuse_scaler
from outergrad.step import param_grad
from outergrad.step.cadence import Share
from outergrad.step.header_builder import Loop
from outergrad.step.joint import JointStep, Point, described

LOOKS, LOOKS_EVERY = 3, 16
"""In 3 of every 16 steps gradients are compared once backward has ended. That takes a microsecond
per parameter, and whoever writes to gradients does so in every step."""


def _ignored(name: str) -> None:
    """Stands for a step's events while none runs."""


class BackwardLoop:
    """Begins a step at the first event of a backward pass, and ends it at the last.

    Taps and hooks report to it: it is their sink. So the model keeps it alive, and with it the
    session, which the user may have dropped.

    Args:
        session: kept alive as long as the model is.
        core: the session's.
        failure: aborts the transport if it fails.
        elastic: moves to another membership before a step begins.
        aftermath: continues with what a step has chosen.
        followers: what else follows a step, in this order.
        next_share: returns what the next step of the other sites is about.
        forget_gradients: drops gradients that were not shared.
        settle_first: is called before a step is abandoned whose backward raised.
        follows_nodes: True if the parameters' nodes are those of the user's backward passes.

    Attributes:
        synchronise: False inside `session.no_sync()`.
        watched: the trained parameters, by name.
        guard: finds changes of the model.
        direct_task: autograd's number of the backward pass whose step takes events directly.
        direct: parameters of those events.
        on_direct_gradient: is told that autograd has a gradient for one of these.
        on_direct_ready: is told that the backward has nothing more for one of these.
        meets_hooks: True if a parameter of this backward has hooks of others.
    """

    def __init__(
        self,
        session: object,
        core: Core,
        failure: FailureHandler,
        elastic: Elastic,
        aftermath: Aftermath,
        followers: Sequence[Follower],
        next_share: Callable[[], Share],
        forget_gradients: Callable[[], None],
        settle_first: Callable[[], None],
        *,
        follows_nodes: bool = True,
    ) -> None:
        self._session, self._exchange, self._at = session, core.exchange, core.at
        self._running, self._ranks, self._tentative = core.running, core.ranks, core.tentative
        self._reporter, self._mishaps, self._loaded = core.reporter, core.mishaps, core.loaded
        self._failure, self._elastic, self._aftermath = failure, elastic, aftermath
        self._followers = followers
        self._next_share, self._forget_gradients = next_share, forget_gradients
        self._settle_first = settle_first
        self.synchronise, self.meets_hooks = True, False
        self._take_no_events()
        model = core.exchange.model
        self.watched = {name: WatchedParameter(name, p, self) for name, p in model.params.items()}
        captured = {name for source in model.index for name in source.params}
        self._past_autograd = PastAutograd(self.watched, sorted(captured & model.params.keys()))
        self.guard = core.ranks.guard(self.watched, follows_nodes=follows_nodes)
        self._last_begun = 0
        self._raised_early: list[tuple[Share, list[Point]]] = []
        """Of each backward that raised before its first event, what it would have shared."""

    @contextmanager
    def unsynchronised(self) -> Iterator[None]:
        """Leaves the gradients of backward passes inside it unshared."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before

    # -- what autograd calls, through the taps --------------------------------------------------

    def taps(self, layer: TappedLayer) -> bool:
        """True if some product of the layer should travel as factors in the next step."""
        return self._exchange.taps(layer)

    def taps_block(self, block: Block) -> bool:
        """True if the block should be computed again in the next step."""
        return self._exchange.taps_block(block)

    def on_use(self, block: Block, use: Use) -> None:
        """Takes the deltas of a use of a block."""
        self._refuse_detached()
        self._step_of("").captured.add_use(block, use)

    def on_joint(self, point: Point, delta: Tensor) -> Tensor:
        """Takes the delta of an output of a part that is each site's own; returns the mean."""
        self._refuse_detached()
        with self._failure.guard():
            return self._step_of("").on_joint(point, delta)

    def on_factors(self, slot: Slot, factors: Callable[[], Factors]) -> None:
        """Takes the factors of a product whose delta has arrived."""
        if not self._at.attached:
            self._refuse_detached()
        self._step_of(slot.weight).captured.add(slot, factors)

    def on_gradient(self, name: str) -> None:
        """Notes that autograd itself has a gradient for the parameter."""
        self._step_of(name).note_gradient(name)

    def on_written(self, name: str) -> None:
        """Notes that the backward wrote to `param.grad` itself."""
        self._step_of(name).note_written(name)

    def on_ready(self, name: str) -> None:
        """Notes that this backward has nothing more for the parameter."""
        self._step_of(name).on_ready(name)

    def on_shard(self, name: str) -> None:
        """Notes that FSDP2 has reduced the gradient of a shard."""
        step = self._step_of(name)
        step.captured.used.add(name)
        if step.shared is None:
            self._exchange.unshared.add(name)

    def on_stale(self, name: str) -> None:
        """Refuses a parameter that was converted after the last look, or unseen by it."""
        if in_distributed_autograd():  # which makes "python_error" of all that is raised
            warnings.warn(
                f"the backward of torch.distributed.autograd (RPC) accumulates {name!r} in its own "
                f"context, where it is not shared between sites: call loss.backward()",
                RuntimeWarning,
                stacklevel=2,
            )
        self.refuse(self.guard.change())
        self.refuse(Change(name, "was replaced or converted after og.distribute()"))

    def on_call(self, watch: ModelWatch) -> None:
        """Looks at the model before its forward."""
        if torch.is_grad_enabled() and current_task() == NO_TASK and self._at.attached:
            self.refuse(self.guard.at_call(watch))
            self._loaded.check()

    def before_applying(self, optimizer: Optimizer) -> None:
        """Looks at the model before an optimizer applies gradients."""
        if self.guard.is_here:
            self._tentative.applied_by(optimizer)
        self.refuse(self.guard.before_applying(optimizer))
        self._elastic.before_applying(optimizer)

    def before_unscaling(self, optimizer: Optimizer) -> None:
        """Refuses a `GradScaler` whose scale a transform would have seen."""
        own = {id(p) for p in self._exchange.model.params.values()}
        if not own.isdisjoint(held(optimizer)):
            refuse_scaler(self._exchange.transform)

    def _step_of(self, name: str) -> Step:
        """Returns the step of a parameter; the first event of a backward begins it.

        Blocks and averages are due every time.
        """
        running = self._running
        step = running.step
        if step is None or step.task != current_task():
            try:
                step = self._begin(current_task())
            except ExchangeError as error:
                raise self._failure.lost_by(error) from error
        if running.due_parts is None or running.due_parts.later is None:
            return step
        later = running.due_parts.later
        return later if name in later.captured.model.params else step

    def _refuse_detached(self) -> None:
        if not self._at.attached:
            raise RuntimeError("this forward ran before session.detach(): run it again")

    # -- a step begins --------------------------------------------------------------------------

    def _begin(self, task: int) -> Step:
        self._last_begun = now()
        refuse_nested_backward()
        self._elastic.require_step()
        self.guard.hold_nodes()
        used = accumulating(self.watched)
        self.refuse(self.guard.at_begin(used))
        self._tentative.begin()
        written = set(self._past_autograd.written()) - self._exchange.unshared
        if self._exchange.drift is not None:
            self._exchange.drift.note_loss()
        if self.synchronise:
            step, due_parts = self._exchange.synchronised(task, used)
        else:
            step, due_parts = self._exchange.unsynchronised(task, used), None
        self._running.begin(step, due_parts)
        if step.shared is not None:
            self._at.group.running.append(self)
            step.captured.has_autograd_grad |= written
        self._past_autograd.begin(used)
        if due_parts is None or due_parts.later is None:
            self.on_direct_gradient = step.captured.has_autograd_grad.add
            self.on_direct_ready = step.ready_sink()
            self.direct, self.direct_task = used, task  # last: a device has a thread of its own
        at_end_of_backward(partial(self._end, task))
        self._ranks.begin()
        return step

    def _take_no_events(self) -> None:
        """Takes events of parameters through this loop until the next step has begun."""
        self.direct_task = NO_TASK
        self.direct: Collection[str] = ()
        self.on_direct_gradient = self.on_direct_ready = _ignored

    # -- a step ends ----------------------------------------------------------------------------

    @untraced
    def _end(self, task: int) -> None:
        """Ends the step of a backward pass that has succeeded here."""
        step = self._running.step
        if step is None or step.task != task:  # left over from a backward that raised
            return
        number, change = self._at.stats.step, self._past_autograd.refused()
        if change is not None:  # the others hear of it as of any backward that raised
            raise change.error(self._at.me)
        self.finish(step)
        if number % LOOKS_EVERY < LOOKS and self._at.stats.step > number:
            at_end_of_backward(partial(self._refuse_overwritten, self._left()))

    def finish(self, step: Step | None) -> None:
        """Makes the gradients of a step the mean over the sites; then come its followers.

        Raises:
            StepDiscardedError: the step does not count, on any site.
            SiteLostError: another site is lost.
        """
        if step is None or step is not self._running.step:
            return
        due_parts, shared = self._running.due_parts, step.shared
        try:
            applied = self._finish(shared)
        except StepDiscardedError as error:
            if shared is None:
                raise
            context = shared.context
            told = self._exchange.attendance.explained(
                error, context.headers, context.header.step, self._at.comm.sites
            )
            if told is error:
                raise
            raise told from error
        if shared is not None:
            self._exchange.attendance.note(shared.context.headers)
            used = shared.context.used if applied else frozenset[str]()
            hooked = used
            if shared.plan is not None and not self.meets_hooks:
                hooked = used - shared.plan.trained  # which this backward has not come to
            outcome = StepOutcome(hooked, used, applied=applied)
        elif due_parts is not None:
            outcome = StepOutcome(due_parts.used | due_parts.released)
        else:
            outcome = StepOutcome(step.captured.used, is_own=self._exchange.several)
        self._follow(outcome)
        if shared is not None:
            self._ranks.note(shared)

    def _follow(self, outcome: StepOutcome) -> None:
        self.meets_hooks = False
        for follower in self._followers:
            follower(outcome)

    def _finish(self, shared: SyncedStep | None) -> bool:
        """Returns whether the step is shared and counts."""
        exchange, due_parts = self._exchange, self._running.due_parts
        try:
            self._complete(shared)
            if due_parts is not None:
                used = due_parts.used | due_parts.released
                exchange.cadence.finish(due_parts, shared.context.used if shared else used)
                exchange.unshared.clear()
            if shared is None or not shared.applied:
                return False
            if shared.task == NO_TASK:  # without a backward, the gradients are used
                self._tentative.nothing_left()
            else:
                self._tentative.left(shared.context.used)
            return True
        finally:
            self._close_and_note(shared)

    def _complete(self, shared: SyncedStep | None) -> None:
        if shared is not None:
            try:
                shared.finish()
            except ExchangeError as error:
                if not self._failure.abort_and_settle(shared, error):
                    raise self._failure.error() from error
        elif self._running.due_parts is None:
            assert self._running.step is not None
            self._running.step.finish()
        elif self._mishaps.skips_bad:
            self._mishaps.alone(self._at.stats.step)

    def close(self, shared: SyncedStep | None) -> None:
        """Forgets the step that is over, and continues with what it has chosen and decided.

        Args:
            shared: the step, if it sends messages to other sites.
        """
        self._take_no_events()
        due_parts, exchange = self._running.end(), self._exchange
        if shared is not None:
            self._at.group.running.remove(self)
        exchange.forget_awaited()
        if shared is not None or not exchange.several:  # else they add up
            exchange.forget_pass(due_parts)
        if shared is not None:
            self._follow_up(shared)
        elif due_parts is not None and due_parts.due is not None:
            self._aftermath.follow_alone()

    def _close_and_note(self, shared: SyncedStep | None) -> None:
        self.close(shared)
        if shared is not None:
            self._aftermath.note(shared)

    def _follow_up(self, step: SyncedStep) -> None:
        self._aftermath.follow(step)
        if step.choice is not None:
            self._exchange.keep_plan(step)

    def _left(self) -> dict[str, tuple[Tensor, int]]:
        """Returns the gradients of now, with their counts of changes."""
        return {
            name: (grad, grad._version)
            for name, watched in self.watched.items()
            if (grad := watched.parameter.grad) is not None
        }

    @untraced
    def _refuse_overwritten(self, left: Mapping[str, tuple[Tensor, int]]) -> None:
        """Refuses gradients that something else changed at the end of this backward."""
        for name, (grad, version) in left.items():
            found = self.watched[name].parameter.grad
            if found is None or found is not grad or found._version != version:
                param_grad.drop(watched.parameter for watched in self.watched.values())
                self.refuse(overwritten(name))

    # -- a backward raised ------------------------------------------------------------------------

    def end_unfinished(self, *, unless: int) -> None:
        """Ends a step whose backward raised here, so that all sites are in step again."""
        self._settle_first()
        running = self._running
        if self._raised_early and running.shared is None:
            self._end_raised_early()
            return
        if running.step is None or running.step.task == unless:
            return  # another session may be in the middle of the same backward
        step = running.shared
        if step is None:
            return
        self._failure.poll_abort()
        try:
            if not self._at.is_lost:
                step.abandon()
        except ExchangeError as error:
            self._failure.abort(error)
        finally:
            self._at.group.untold = None  # the loop knows that this step is void
            self._close_and_note(step)

    def on_backward(self, outputs: Sequence[Any]) -> None:
        """Notes the state of gradients before autograd runs."""
        if self.guard.is_here:
            self._past_autograd.called(looks=self._at.stats.step % LOOKS_EVERY < LOOKS)

    def on_failed_backward(self, failed: FailedBackward) -> None:
        """Counts a backward that raised before its first event as a step that raised here.

        The others wait for it, and must not be given the next one of this site in its place.
        """
        exchange, at = self._exchange, self._at
        if self._last_begun > failed.began or at.is_lost:
            return
        if not (at.attached and self.synchronise and exchange.several):
            return
        nodes = failed.nodes()
        if not any(watched.node in nodes for watched in self.watched.values()):
            return
        if exchange.drift is not None:  # in this pass the others wait for this site's vote
            self._elastic.require_group()
            exchange.drift.note_loss()
        before = exchange.accumulator.take(set())
        with self._failure.guard():
            share = exchange.cadence.due_parts(NO_TASK, set(), before, rows=True).due
        exchange.forget_pass(None)
        if share is not None:
            points = [] if exchange.joint is None else exchange.joint.points_in(nodes)
            self._raised_early.append((share, points))
            at.group.running.append(self)

    def _end_raised_early(self) -> None:
        """Abandons, with the other sites, a step that this site never began."""
        exchange, at = self._exchange, self._at
        (share, points), *self._raised_early = self._raised_early
        at.group.running.remove(self)
        self._failure.poll_abort()
        if at.is_lost:
            return
        loop = Loop(0, exchange.attendance.join, exchange.buffers.none_written())
        header, joint = share.header_builder.absent(at.stats.step, loop), None
        if exchange.joint is not None:
            header = replace(header, joint=described(points))
            joint = JointStep(points, at.comm, header, exchange.joint.params)
        about = {"model": share.model, "planner": share.planner, "joint": joint}
        with self._running.replaced():
            step = None
            try:
                step = exchange.new_step(header, **about)
                self._running.begin(step)
                step.abandon()
            except BudgetSpentError:  # the others have not begun it; this loop's next step raises
                pass
            except ExchangeError as error:
                self._failure.abort(error)
            finally:
                at.group.untold = None  # the loop knows that this step is void
                if step is not None:
                    self._follow_up(step)
                    self._aftermath.note(step)

    # -- steps without a backward -----------------------------------------------------------------

    def shadow(self, join: Join, weight: int = 0) -> SyncedStep:
        """Begins a step without a backward; gradients that were not shared are dropped.

        Args:
            join: what this site announces of its loop.
            weight: how much this site counts.
        """
        self._elastic.require_group()
        self._forget_gradients()
        exchange, share = self._exchange, self._next_share()
        loop = Loop(weight, join, exchange.buffers.none_written())
        header = share.header_builder.absent(self._at.stats.step, loop)
        step = exchange.new_step(header, model=share.model, planner=share.planner)
        self.enter(step)
        return step

    def enter(self, step: SyncedStep) -> None:
        """Makes a step without a backward the one that runs."""
        self._at.group.running.append(self)
        self._running.begin(step)

    def drop(self, step: SyncedStep) -> None:
        """Ends a step of which only the headers were needed."""
        self._running.end()
        self._at.group.running.remove(self)
        self._exchange.planner.commit(applied=False)

    # -- the model has changed --------------------------------------------------------------------

    def refuse(self, change: Change | None) -> None:
        """Raises on all sites for a change of the model.

        Raises:
            RuntimeError: names the parameter, the site and the remedy.
        """
        if change is None:
            return
        error = change.error(self._at.me)
        try:
            if self._can_tell():
                self._tell(change)
        except RuntimeError as failure:
            raise error from failure
        raise error

    def _can_tell(self) -> bool:
        """True if the next step can be abandoned, which this site has not begun."""
        exchange, step = self._exchange, self._running.step
        begun = step is not None and step.task == current_task()  # fails by itself
        usual = exchange.several and exchange.joint is None and exchange.cadence.always
        return usual and not self._at.is_lost and not begun

    def _tell(self, change: Change) -> None:
        """Abandons the next step together with the other sites, so that none applies it."""
        with self.guard.as_agreed():
            step = self.shadow(self._exchange.attendance.join)
            try:
                with self._failure.guard():
                    step.abandon(changed=change.name)
            finally:
                self.close(step)
        self._aftermath.note(step)
