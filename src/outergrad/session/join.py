"""`session.join()`: a site that has run out of batches takes part in the others' steps.

It does so by shadow steps, which have no backward: its header says that it uses nothing and has a
weight of 0, and it sends no rows, and zeros for formed gradients. So the mean is over the sites
that have a batch. The site receives the mean as all others do, and stays a replica.

If one loop steps several sessions (a generator and a discriminator), a site that has run out cannot
know which of them the others step next. So it follows all of them at once, each in a thread; the
sessions are on process groups of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outergrad.capture.loop_watch import LoopWatch
from outergrad.core.errors import ExchangeError, StepDiscardedError
from outergrad.messages.header import Header, Join
from outergrad.messages.raw import has_elements
from outergrad.session.going_on import GoingOn
from outergrad.session.made_equal import ReplicaState
from outergrad.step import param_grad
from outergrad.step.cadence import Share
from outergrad.step.header_builder import Loop
from outergrad.step.step import SharedStep

_COUNTS_TWICE = (
    "divide_by_initial_world_size=True counts sites, and weighting='samples' samples, of which one "
    "that has run out has none: leave one of them out"
)


class _JoinedHere(threading.local):
    """Sessions whose `join` the thread is in, the outermost first."""

    def __init__(self) -> None:
        self.sessions: list[Joining] = []


_JOINED = _JoinedHere()


class Joining(GoingOn):
    """Base of a session whose sites may have unequal numbers of batches."""

    _watch: LoopWatch | None = None
    _has_left = False
    _last_active = 0
    _weight_out = 0
    """Weight of this site in the steps of the others once it has run out."""
    _after: Callable[[], Any] | None = None
    """User's `step=`: does what the loop does after each backward; None for the seen optimizers."""

    @contextmanager
    def join(
        self,
        *,
        step: Callable[[], Any] | None = None,
        divide_by_initial_world_size: bool = False,
    ) -> Iterator[None]:
        """Lets the sites run the loop inside it over unequal numbers of batches.

        A site whose loop is over takes part in the others' steps with a weight of 0, until all
        have run out: the mean gradient is over the sites that have a batch. Every site must enter
        it and run nothing but the steps of this model inside. At the end all replicas are equal,
        with the states of their optimizers.

        A loop that steps several models, each distributed over a process group of its own, goes
        inside the joins of all: `with s1.join(), s2.join():`.

        Args:
            step: what the loop does after each backward; called after each step of the others:
                `optimizer.step`, or more, for a scaler or a schedule. By default the optimizers
                that the loop was seen to step.
            divide_by_initial_world_size: whether sums are divided by the number of all sites, also
                of those that have run out, as DDP's `join` does by default: late batches then
                count as much as all others, and gradients become smaller at the end. The same on
                every site; only with `weighting="sites"`.

        Raises:
            RuntimeError: this session or its model cannot be joined; or the sites lost each other.
            StepDiscardedError: the loop of another site raised.
            TypeError: `step` cannot be called.
        """
        if not self._several:
            yield
            return
        if step is not None and not callable(step):
            raise TypeError(
                f"session.join(step=a {type(step).__name__}): pass what the loop does after each "
                f"backward, as step=optimizer.step"
            )
        self._refuse_join(divides_by_all=divide_by_initial_world_size)
        watch = self._watch_loop()
        self._join, self._has_left, self._last_active = Join.INSIDE, False, 0
        self._weight_out, self._after = int(divide_by_initial_world_size), step
        self._planner.forget_headers()
        _JOINED.sessions.append(self)
        try:
            watch.begin()
            yield
            _follow_all(_JOINED.sessions)
            self._join = Join.NONE
            remedy = "session.join(): pass join(step=optimizer.step)"
            replica = self._replica(self._buffers.tensors, watch.present, remedy)
            self._make_replicas_equal(replica)
        except ExchangeError as error:
            raise self._lost_by(error) from error
        except Exception:
            self.leave()
            raise
        finally:
            _JOINED.sessions.remove(self)
            self._join, self._after = Join.NONE, None
            watch.end()

    def _make_replicas_equal(self, replica: ReplicaState) -> None:
        """Makes all replicas equal to that of a site that was active last."""
        replica.make_equal(self._comm, self._last_active)

    # -- shadow steps ---------------------------------------------------------------------------

    def follow(self, turn: Lock) -> None:
        """Takes part in the steps of the others until all sites have run out.

        Args:
            turn: lock between the threads of several sessions, held but while one waits for the
                others to begin a step. This cannot deadlock: the others go through their steps in
                one order, and a step that all have begun ends without any other.
        """
        assert self._watch is not None
        self._watch.learn()
        after = self._after or self._watch.repeat
        while True:
            with turn:
                step = self._shadow(Join.OUT)
            headers = step.agreed()
            with turn:
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
        """Begins a shadow step, which has no backward."""
        self._require_group()
        self._forget_gradients()
        weight = self._weight_out if join == Join.OUT else 0
        loop, due = Loop(weight, join, self._buffers.none_written()), self._next_share()
        header = due.header_builder.absent(self._stats.step, loop)
        step = self._step = self._new_step(header, model=due.model, planner=due.planner)
        return step

    def _next_share(self) -> Share:
        return Share(self._model, self._planner, self._header_builder)

    def _forget_gradients(self) -> None:
        """Drops all gradients, as the others' loops do before a backward, also unshared ones."""
        self._accumulator.clear()
        self._unshared.clear()
        param_grad.drop((*self._model.params.values(), *self._local.values()))
        if self._watch is not None:
            for optimizer in self._watch.present.values():
                optimizer.zero_grad()

    def _drop(self, step: SharedStep) -> None:
        """Drops a step of which only the headers were needed."""
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

    # -- loops that raised ----------------------------------------------------------------------

    def leave(self) -> None:
        """Tells the others, unless they know or are lost, that this site takes no more part."""
        if self._join == Join.NONE or self._has_left or self._group.lost:
            return
        self._has_left = True
        with suppress(RuntimeError):  # the loop's own error says more
            step = self._shadow(Join.GONE)
            try:
                step.abandon()
            finally:
                self._close(step)

    # -- checks ---------------------------------------------------------------------------------

    def _refuse_join(self, *, divides_by_all: bool) -> None:
        counts_twice = divides_by_all and not self._weighting.is_even, _COUNTS_TWICE
        objections = (*self._objections(), counts_twice)
        why = next((why for holds, why in objections if holds), None)
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
        frozen = [p for p in self._frozen.values() if has_elements(p)]
        parameters = [*self._model.params.values(), *frozen]
        return ReplicaState(parameters, buffers, optimizers, self._names(), remedy)


def _follow_all(sessions: Sequence[Joining]) -> None:
    """Takes part in the others' steps of all sessions, until all sites have run out in all.

    The loops of the outer sessions may go on afterwards, as if they had just begun.

    Raises:
        RuntimeError: the first error of a session; this site takes part in none of them any more.
    """
    turn, errors = Lock(), list[BaseException]()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def follow(session: Joining) -> None:
        try:
            session.follow(turn)
        except BaseException as error:
            errors.append(error)
            if not isinstance(error, ExchangeError):
                session.leave()  # at once: the others would wait for it, and this site for them

    def follow_there(session: Joining) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # the current device of a new thread is the first one
        follow(session)

    *outer, own = sessions
    threads = [Thread(target=follow_there, args=(one,), daemon=True) for one in outer]
    for thread in threads:
        thread.start()
    follow(own)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
