"""Loops over unequal numbers of batches: a site that has run out takes part in the others' steps.

It takes part by shadow steps, which have no backward: its header says that it uses nothing and
weighs nothing, its rows are none and what it would send formed is zeros, so that the mean is over
the sites that have a batch. What the mean is it learns as all do, so it stays a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from outergrad.capture.loop_watch import LoopWatch
from outergrad.core.errors import ExchangeError, StepDiscardedError
from outergrad.messages.header import Header, Join
from outergrad.session.going_on import GoingOn
from outergrad.session.made_equal import ReplicaState
from outergrad.step import param_grad
from outergrad.step.cadence import Share
from outergrad.step.header_builder import Loop
from outergrad.step.step import SharedStep


class Joining(GoingOn):
    """The hooks of a site whose loop may be shorter or longer than the others'."""

    _watch: LoopWatch | None = None
    _has_left = False
    _last_active = 0

    @contextmanager
    def join(self, *, step: Callable[[], Any] | None = None) -> Iterator[None]:
        """Around a loop of which the sites may have unequal numbers of batches.

        A site whose loop is over takes part in the others' steps with a weight of 0, until all
        are out: the mean gradient is over the sites that have a batch. Every site must enter it
        and run nothing but the steps of this model inside. In the end all replicas are equal,
        with the states of their optimizers.

        Args:
            step: what the loop does after each backward, called after each step of the others:
                `optimizer.step`, or more, for a scaler or a schedule. By default the optimizers
                that the loop was seen to step.

        Raises:
            RuntimeError: this session or its model cannot be joined; or the sites lost each other.
            StepDiscardedError: the loop of another site raised.
        """
        if not self._several:
            yield
            return
        self._refuse_join()
        watch = self._watch_loop()
        self._join, self._has_left, self._last_active = Join.INSIDE, False, 0
        self._planner.forget_headers()
        try:
            watch.begin()
            yield
            watch.learn()
            self._follow(step or watch.repeat)
            self._join = Join.NONE
            remedy = "session.join(): pass join(step=optimizer.step)"
            replica = self._replica(self._buffers.tensors, watch.present, remedy)
            self._make_replicas_equal(replica)
        except ExchangeError as error:
            raise self._lost_by(error) from error
        except Exception:
            self._leave()
            raise
        finally:
            self._join = Join.NONE
            watch.end()

    def _make_replicas_equal(self, replica: ReplicaState) -> None:
        """All take those of a site that was active last."""
        replica.make_equal(self._comm, self._last_active)

    # -- shadow steps ---------------------------------------------------------------------------

    def _follow(self, after: Callable[[], Any]) -> None:
        """Takes part in the steps of the others until all are out."""
        while True:
            step = self._shadow(Join.OUT)
            headers = step.agreed()
            if all(header.join == Join.OUT for header in headers):
                self._drop(step)
                return
            try:
                self._finish(step)
            except StepDiscardedError:
                if self._has_left:
                    raise
                continue
            after()

    def _shadow(self, join: Join) -> SharedStep:
        """Begins a step without a backward."""
        self._require_group()
        self._forget_gradients()
        loop, due = Loop(0, join, self._buffers.none_written()), self._next_share()
        header = due.header_builder.absent(self._stats.step, loop)
        step = self._step = self._new_step(header, model=due.model, planner=due.planner)
        return step

    def _next_share(self) -> Share:
        """What the next step of the others is about."""
        return Share(self._model, self._planner, self._header_builder)

    def _forget_gradients(self) -> None:
        """As the loops of the others do before each backward; what was not shared is lost."""
        self._accumulator.clear()
        self._unshared.clear()
        param_grad.drop((*self._model.params.values(), *self._local.values()))
        if self._watch is not None:
            for optimizer in self._watch.present.values():
                optimizer.zero_grad()

    def _drop(self, step: SharedStep) -> None:
        """Of a step only the headers were needed."""
        self._step = None
        self._group.running.remove(self)
        self._planner.commit(applied=False)

    def _finish(self, step: Any) -> None:
        try:
            super()._finish(step)
        except StepDiscardedError as error:
            gone = next((h.rank for h in step.context.headers if h.join == Join.GONE), None)
            if gone is None:
                raise
            self._has_left = True
            raise StepDiscardedError(
                f"the loop of site {gone} raised inside session.join(): it takes part in no more "
                f"steps, and step {step.context.header.step} must not be applied"
            ) from error
        if self._join != Join.NONE and isinstance(step, SharedStep):
            headers: Sequence[Header] = step.context.headers
            self._last_active = min(h.rank for h in headers if h.join == Join.INSIDE)

    # -- when a loop raised ---------------------------------------------------------------------

    def _leave(self) -> None:
        """Tells the others that this site takes part in no more, unless they know or are lost."""
        if self._join == Join.NONE or self._has_left or self._group.lost:
            return
        with suppress(RuntimeError):  # what the loop raised says more
            step = self._shadow(Join.GONE)
            try:
                step.abandon()
            finally:
                self._close(step)

    # -- what is checked ------------------------------------------------------------------------

    def _refuse_join(self) -> None:
        why = next((why for holds, why in self._objections() if holds), None)
        if why is not None:
            raise RuntimeError(f"session.join(): {why}")

    def _objections(self) -> Iterator[tuple[bool, str]]:
        yield not self._attached, "the session is detached: call og.distribute() again"
        yield self._join != Join.NONE, "this loop is in it already; use one around the other"
        yield (
            len(self._group.attached) > 1,
            "several sessions are on this process group, and a site that has run out could not "
            "tell whose step is next: give each model a group of its own, "
            "og.distribute(model, group=dist.new_group()), or detach() those that are done",
        )
        yield (
            self._comm.min_sites is not None,
            "og.Star(when_lost='go on'): a site that has run out could not tell which step is void "
            "when another one is lost: use loops of equal length",
        )
        yield (
            self._joint is not None,
            "PerLayer(joint=True) needs a delta of every site in every step: use loops of equal "
            "length",
        )
        yield (
            bool(self._norms_over_sites),
            f"{', '.join(self._norms_over_sites[:1])!r} is a SyncBatchNorm, whose forward waits "
            "for all sites, also for those that have run out: use loops of equal length",
        )
        yield (
            not self._cadence.always,
            "a method with every=k shares nothing in most steps, in which the others could not "
            "hear that a site has run out: use every=1",
        )

    def _watch_loop(self) -> LoopWatch:
        if self._watch is None:
            self._watch = LoopWatch(self._names(), lambda: self._stats.step)
        return self._watch

    def _names(self) -> Mapping[int, str]:
        shared: dict[str, nn.Parameter] = {**self._model.params, **self._frozen}
        return {id(p): name for name, p in shared.items()}

    def _replica(
        self, buffers: Sequence[Tensor], optimizers: Mapping[str, Optimizer], remedy: str
    ) -> ReplicaState:
        parameters = [*self._model.params.values(), *self._frozen.values()]
        return ReplicaState(parameters, buffers, optimizers, self._names(), remedy)
