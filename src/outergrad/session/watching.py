"""Guard of a session's model against changes by others, and calls of others' gradient hooks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from outergrad.capture.backward_listeners import (
    FailedBackward,
    ignore_backwards,
    listen_to_backwards,
    now,
)
from outergrad.capture.changes import Change, Look, ModelWatch, overwritten
from outergrad.capture.claims import HeldHooks, with_any
from outergrad.capture.class_swap import CallSwap
from outergrad.capture.engine import (
    NO_TASK,
    at_end_of_backward,
    current_task,
    in_distributed_autograd,
    untraced,
)
from outergrad.capture.optimizer_steps import look_at_steps, look_away
from outergrad.capture.parameters import hold_again
from outergrad.core.errors import ExchangeError
from outergrad.core.transport import Comm
from outergrad.session.inspect import Inspection
from outergrad.session.join import Joining
from outergrad.session.settings import Settings
from outergrad.session.stepping import LOOKS, LOOKS_EVERY
from outergrad.step import param_grad
from outergrad.step.cadence import Share
from outergrad.step.header_builder import Loop
from outergrad.step.joint import JointStep, Point, described
from outergrad.step.repeated import RepeatedStep
from outergrad.step.step import SharedStep
from outergrad.step.unsynced import UnsyncedStep


class Watching(Joining):
    """Base of a session that refuses a changed model, and calls post-accumulate hooks of others.

    The model is compared with what the sites agreed on when it is called, when a backward begins
    without a call seen before it or without some parameter, and before an optimizer's step. One
    place alone does not suffice: if every parameter was replaced, autograd calls no hook of ours,
    and where only parts of the model are called, or a compiled graph, no call is seen.
    """

    _swap: CallSwap | None = None
    _model_watch: Callable[[], ModelWatch | None] = staticmethod(lambda: None)
    _thread = 0
    _called = _began = False
    _last_begun = 0
    """Order number (`backward_listeners.now`) of the first event of this model's last backward."""

    def __init__(
        self, inspection: Inspection, comm: Comm, fingerprint: int, settings: Settings
    ) -> None:
        super().__init__(inspection, comm, fingerprint, settings)
        self._raised_early: list[tuple[Share, list[Point]]] = []
        """Per backward that raised before its first event: the due share, and its joint points."""

    def watch(self, model: nn.Module, watch: ModelWatch) -> None:
        """Guards a model from now on."""
        self._follow_nodes(watch)
        self._model_watch, self._thread = ref(watch), get_ident()
        try:
            self._swap = CallSwap(model, lambda: self._on_call(watch))
        except TypeError:  # the class allows no subclass: checks in backward and steps remain
            self._kept_watch = watch
        look_at_steps(self)
        if self._several:
            listen_to_backwards(self)
        if self._batch is not None:
            self._batch.watch(model)

    def _follow_nodes(self, watch: ModelWatch) -> None:
        if self._watched:
            watch.follow(hold_again(self._watched.values()))

    def let_go_of_nodes(self) -> None:
        """Drops references to autograd nodes, so that Python can collect session and model."""
        super().let_go_of_nodes()
        watch = self._model_watch()
        if watch is not None:
            watch.let_go()

    def _hold_nodes(self) -> Sequence[Node | None]:
        nodes, watch = super()._hold_nodes(), self._model_watch()
        if nodes and watch is not None:
            watch.hold_again(nodes)
        return nodes

    def _forget_model(self) -> None:
        look_away(self)
        ignore_backwards(self)
        if self._batch is not None:
            self._batch.remove()
        watch = self._model_watch()
        if watch is not None:
            watch.unfollow()
        if self._swap is not None:
            self._swap.restore()
            self._swap = None

    # -- comparisons of the model ---------------------------------------------------------------

    def _on_call(self, watch: ModelWatch) -> None:
        if torch.is_grad_enabled() and current_task() == NO_TASK and self._attached:
            self._refuse(watch.wrapped())
            self._refuse(watch.change(Look.KINDS))
            self._called = True

    def _refuse_changed(self, used: Set[str]) -> None:
        watch = self._model_watch()
        if watch is not None and not (self._called and len(used) == len(self._watched)):
            self._refuse(watch.change())
        self._called, self._began = False, True

    def before_applying(self, optimizer: Optimizer) -> None:
        """Checks the model before an optimizer steps, maybe by a backward that was not noticed."""
        if get_ident() == self._thread:
            self._tentative.applied_by(optimizer)
        watch = self._model_watch() if get_ident() == self._thread else None
        if watch is None:
            return
        is_own = self._began or watch.held_some_of(optimizer)
        change = watch.change(Look.NODES if is_own and not self._began else Look.NONE)
        self._began = False
        if change is not None and watch.holds_some_of(optimizer):
            self._refuse(change)

    def on_stale(self, name: str) -> None:
        """Refuses a gradient by another node than the watched one: the parameter was converted."""
        if in_distributed_autograd():  # which replaces every message by "python_error"
            warnings.warn(
                f"the backward of torch.distributed.autograd (RPC) accumulates {name!r} in its own "
                f"context, where it is not shared between sites: call loss.backward()",
                RuntimeWarning,
                stacklevel=2,
            )
        watch = self._model_watch()
        if watch is not None:
            self._refuse(watch.change())
        self._refuse(Change(name, "was replaced or converted after og.distribute()"))

    # -- gradients overwritten in the same backward ----------------------------------------------

    def _look_at_end(self) -> None:
        # Queued from within a callback, this one runs after all that are queued by now.
        at_end_of_backward(partial(self._refuse_overwritten, self._left()))

    def _left(self) -> dict[str, tuple[Tensor, int]]:
        """Returns the gradients of now, with their versions."""
        found = ((name, watched.parameter.grad) for name, watched in self._watched.items())
        return {name: (grad, grad._version) for name, grad in found if grad is not None}

    @untraced
    def _refuse_overwritten(self, left: Mapping[str, tuple[Tensor, int]]) -> None:
        """Refuses gradients that another callback at the end of this backward has changed."""
        for name, (grad, version) in left.items():
            now = self._watched[name].parameter.grad
            if now is None or now is not grad or now._version != version:
                param_grad.drop(watched.parameter for watched in self._watched.values())
                self._refuse(overwritten(name))

    # -- telling the other sites ----------------------------------------------------------------

    def _refuse(self, change: Change | None) -> None:
        if change is None:
            return
        error = change.error(self._comm.rank)
        try:
            if self._can_tell():
                self._tell(change)
        except RuntimeError as failure:
            raise error from failure
        raise error

    def _can_tell(self) -> bool:
        """True if this site can abandon, with the others, a step that it has not begun."""
        lost = self._group.lost is not None
        # A step that this backward has begun fails by itself once the error is raised in it.
        begun = self._step is not None and self._step.task == current_task()
        usual = self._several and self._joint is None and self._cadence.always
        return usual and not lost and not begun

    def _tell(self, change: Change) -> None:
        """Abandons the next step together with the other sites, so that none applies it."""
        watch = self._model_watch()
        assert watch is not None
        with watch.as_agreed():
            step = self._shadow(self._join)
            try:
                with self._giving_up():
                    step.abandon(changed=change.name)
            finally:
                self._close(step)
        self._take_note(step)

    # -- a backward that raised before its first event -------------------------------------------

    def _begin(self, task: int) -> Any:
        self._last_begun = now()
        return super()._begin(task)

    def on_backward(self) -> None:
        """Notes the state of gradients before autograd reaches any node."""
        if get_ident() == self._thread:
            self._past_autograd.called(looks=self._stats.step % LOOKS_EVERY < LOOKS)

    def on_failed_backward(self, failed: FailedBackward) -> None:
        """Counts a backward that raised before its first event as a step that raised here.

        The others wait for that step, and must not get this site's next one in its place.
        """
        if self._last_begun > failed.began or self._group.lost is not None:
            return
        if not (self._attached and self._synchronise and self._several):
            return
        nodes = failed.nodes()
        if not any(watched.node in nodes for watched in self._watched.values()):
            return
        before = self._accumulator.take(set())
        share = self._cadence.due_parts(NO_TASK, set(), before, rows=True).due
        self._forget_pass(None)
        if share is not None:
            points = [] if self._joint is None else self._joint.points_in(nodes)
            self._raised_early.append((share, points))
            self._group.running.append(self)

    def end_unfinished(self, *, unless: int) -> None:
        """Ends a step whose backward raised here, so that all sites are in step again."""
        if self._raised_early and not isinstance(self._step, SharedStep | RepeatedStep):
            self._end_raised_early()
        else:
            super().end_unfinished(unless=unless)

    def _end_raised_early(self) -> None:
        """Abandons, with the other sites, a step that this site never began."""
        (share, points), *self._raised_early = self._raised_early
        self._group.running.remove(self)
        self._hear_of_end()
        if self._group.lost is not None:
            return
        loop = Loop(0, self._join, self._buffers.none_written())
        header, joint = share.header_builder.absent(self._stats.step, loop), None
        if self._joint is not None:
            header = replace(header, joint=described(points))
            joint = JointStep(points, self._comm, header, self._joint.params)
        about = {"model": share.model, "planner": share.planner, "joint": joint}
        before, step = self._step, None
        try:
            step = self._step = self._new_step(header, **about)
            step.abandon()
        except ExchangeError as error:
            self._give_up(error)
        finally:
            self._group.untold = None  # the loop knows that this step is void
            self._step = before
            if step is not None:
                self._group.running.remove(self)
                self._follow_up(step)
                self._take_note(step)

    # -- hooks of others, held back until gradients are means -----------------------------------

    def _finish(self, step: Any) -> None:
        if step is not self._step:
            return
        due_parts = self._due_parts
        super()._finish(step)
        if isinstance(step, SharedStep):
            self._run_hooks(step.context.used if step.applied else ())
        elif due_parts is not None:
            self._run_hooks(due_parts.used | due_parts.released)
        elif isinstance(step, UnsyncedStep):
            self._run_hooks(step.captured.used, shared=not self._several)

    def _finish_repeated(self, step: RepeatedStep) -> None:
        super()._finish_repeated(step)
        if self.meets_hooks:
            self._run_hooks(step.context.used)

    def _run_hooks(self, names: Iterable[str], *, shared: bool = True) -> None:
        """Calls the held hooks of these parameters, in the same order on every site.

        Raises:
            RuntimeError: a hook applied a gradient of this site alone.
        """
        self.meets_hooks = False
        hooks, names = self._hooks(), set(names)
        hooked = [name for name in reversed(with_any(hooks)) if name in names]
        with self._watch.passing_over() if self._watch is not None else nullcontext():
            spent = [name for name in hooked if hooks[name].run()]
        self._tentative.used(spent)
        if spent and not shared:
            raise RuntimeError(
                f"{spent[0]!r} or its gradient was used up by a post-accumulate hook (an optimizer "
                f"in backward) inside session.no_sync(), where the gradient is that of site "
                f"{self._comm.rank} alone: the sites are no replicas any more; start again "
                f"without no_sync()"
            )

    def _hooks(self) -> dict[str, HeldHooks]:
        return {name: watched.hooks for name, watched in self._watched.items()}
