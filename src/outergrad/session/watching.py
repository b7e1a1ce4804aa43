"""What others do to the model of a session: changes of it, and hooks behind its gradients."""

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
    """Refuses a model that is not what the sites agreed on, and calls hooks that were held.

    The model is looked at when it is called, when a backward begins of which no call was seen or
    which misses a parameter, and before an optimizer's step: if every parameter was replaced,
    autograd has nothing to tell, and where only parts of the model are called, or its graph, nor
    have its calls.
    """

    _swap: CallSwap | None = None
    _model_watch: Callable[[], ModelWatch | None] = staticmethod(lambda: None)
    _thread = 0
    _called = _began = False
    _last_begun = 0
    """When a backward of this model last had its first event, by `backward_listeners.now`."""

    def __init__(
        self, inspection: Inspection, comm: Comm, fingerprint: int, settings: Settings
    ) -> None:
        super().__init__(inspection, comm, fingerprint, settings)
        self._raised_early: list[tuple[Share, list[Point]]] = []
        """Of each backward that raised before its first event, what it would have shared."""

    def watch(self, model: nn.Module, watch: ModelWatch) -> None:
        """Looks at a model from now on."""
        self._follow_nodes(watch)
        self._model_watch, self._thread = ref(watch), get_ident()
        try:
            self._swap = CallSwap(model, lambda: self._on_call(watch))
        except TypeError:  # a class that allows no subclass: backward and optimizers remain
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
        """Python looks for garbage, of which the session may be a part."""
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
        """The session ends, and holds on to no node of autograd."""
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

    # -- when the model is looked at ------------------------------------------------------------

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
        """An optimizer is about to apply gradients, maybe of a backward that nobody heard of."""
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
        """A parameter was converted behind the last look, or so that it could not be seen then."""
        if in_distributed_autograd():  # which makes "python_error" of all that is raised
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

    # -- what becomes of gradients in the same backward ------------------------------------------

    def _look_at_end(self) -> None:
        """Makes sure that what else waits for the end of backward leaves gradients alone."""
        at_end_of_backward(partial(self._refuse_overwritten, self._left()))

    def _left(self) -> dict[str, tuple[Tensor, int]]:
        """Gradients as they are now, with their counts of changes."""
        found = ((name, watched.parameter.grad) for name, watched in self._watched.items())
        return {name: (grad, grad._version) for name, grad in found if grad is not None}

    @untraced
    def _refuse_overwritten(self, left: Mapping[str, tuple[Tensor, int]]) -> None:
        """Whatever else waited for the end of this backward has been called by now."""
        for name, (grad, version) in left.items():
            now = self._watched[name].parameter.grad
            if now is None or now is not grad or now._version != version:
                param_grad.drop(watched.parameter for watched in self._watched.values())
                self._refuse(overwritten(name))

    # -- what the sites hear of it --------------------------------------------------------------

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
        """Whether a step can be given up that this site has not begun."""
        lost = self._group.lost is not None
        begun = self._step is not None and self._step.task == current_task()  # fails by itself
        usual = self._several and self._joint is None and self._cadence.always
        return usual and not lost and not begun

    def _tell(self, change: Change) -> None:
        """Gives up the next step together with the other sites, so that none applies it."""
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
        """Notes the state of gradients before autograd comes to anything."""
        if get_ident() == self._thread:
            self._past_autograd.called(looks=self._stats.step % LOOKS_EVERY < LOOKS)

    def on_failed_backward(self, failed: FailedBackward) -> None:
        """Counts it as a step that raised here.

        The others wait for it, and must not be given the next one of this site in its place.
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
        """Gives up, with the other sites, a step that this site never began."""
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

    # -- hooks that were held -------------------------------------------------------------------

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
        """Calls them for these parameters, in the same order on every site.

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
        """Of every parameter of the model."""
        return {name: watched.hooks for name, watched in self._watched.items()}
