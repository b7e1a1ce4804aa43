"""Loops over unequal numbers of batches: a site that has run out joins the others' steps.

It joins by shadow steps, which have no backward: its header says that it uses nothing and weighs
nothing, it sends no rows, and zeros where gradients are summed. So the mean is over the sites that
have a batch. The site receives the mean as all do, and stays a replica.

Where one loop steps several sessions (a generator and a discriminator), a site that has run out
does not know which of them the others step next. So it listens to all of them at once, each in a
thread; they are on process groups of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Any

import torch

from outergrad.capture.optimizer_steps import LoopWatch
from outergrad.core.errors import ExchangeError, StepDiscardedError
from outergrad.messages.header import Join
from outergrad.session.core import Core
from outergrad.session.failure import FailureHandler
from outergrad.session.loop import BackwardLoop

_COUNTS_TWICE = (
    "divide_by_initial_world_size=True counts sites, and weighting='samples' samples, of which one "
    "that has run out has none: leave one of them out"
)


class _JoinedHere(threading.local):
    """The loops whose `join` a thread is in, from the outermost on."""

    def __init__(self) -> None:
        self.loops: list[UnevenLoops] = []


_JOINED = _JoinedHere()


class UnevenLoops:
    """The joined loop of a session, which may be shorter or longer than the others'.

    Args:
        core: the session's.
        failure: aborts the transport if it fails.
        loop: makes the session's steps.
        watch: learns which optimizers the training loop steps.
        norms: names of SyncBatchNorm layers, whose forward waits for all sites.
    """

    def __init__(
        self,
        core: Core,
        failure: FailureHandler,
        loop: BackwardLoop,
        watch: LoopWatch,
        norms: Sequence[str],
    ) -> None:
        self._exchange, self._at, self._ranks = core.exchange, core.at, core.ranks
        self._failure, self._loop, self._watch, self._norms = failure, loop, watch, norms
        self._attendance = core.exchange.attendance
        self._weight_out = 0
        """How much this site counts in the steps of the others once it has run out."""
        self._after: Callable[[], Any] | None = None
        """What the loop does after each backward, if the user has said so."""

    @contextmanager
    def join(self, step: Callable[[], Any] | None, *, divides_by_all: bool) -> Iterator[None]:
        """Wraps the loop; see `Session.join`.

        Raises:
            TypeError: `step` cannot be called.
            RuntimeError: this session or its model cannot be joined; or the sites lost each other.
            StepDiscardedError: the loop of another site raised.
        """
        if step is not None and not callable(step):
            raise TypeError(
                f"session.join(step=a {type(step).__name__}): pass what the loop does after each "
                f"backward, as step=optimizer.step"
            )
        self._refuse(divides_by_all=divides_by_all)
        self._attendance.enter()
        self._weight_out, self._after = int(divides_by_all), step
        self._exchange.planner.forget_headers()
        _JOINED.loops.append(self)
        try:
            self._watch.begin()
            yield
            _follow_all(_JOINED.loops)
            self._attendance.exit()
            remedy = "session.join(): pass join(step=optimizer.step)"
            buffers = self._exchange.buffers.tensors
            replica = self._exchange.replica(buffers, self._watch.present, remedy)
            self._ranks.make_equal(replica)
            replica.make_equal(self._at.comm, self._attendance.last_active)
        except ExchangeError as error:
            raise self._failure.lost_by(error) from error
        except Exception:
            self.leave()
            raise
        finally:
            _JOINED.loops.remove(self)
            self._attendance.exit()
            self._after = None
            self._watch.end()

    def follow(self, turn: Lock) -> None:
        """Joins the steps of the others until all are out.

        Args:
            turn: held while it does anything but wait for the others to begin a step. That one of
                several sessions holds it is no cause to wait for ever: the others go through their
                steps in one order, and a step that all have begun ends without any other.
        """
        self._watch.learn()
        after = self._after or self._watch.repeat
        while True:
            with turn:
                step = self._loop.shadow(Join.OUT, self._weight_out)
            headers = step.agreed()
            with turn:
                if all(header.join == Join.OUT for header in headers):
                    self._loop.drop(step)
                    return
                try:
                    self._loop.finish(step)
                except StepDiscardedError:
                    if self._attendance.has_left:
                        raise
                    continue
                after()

    def leave(self) -> None:
        """Tells the others that this site joins no more steps, unless they know or are lost."""
        if self._at.is_lost or not self._attendance.leave():
            return
        with suppress(RuntimeError):  # what the loop raised says more
            step = self._loop.shadow(Join.GONE)
            try:
                step.abandon()
            finally:
                self._loop.close(step)

    def zero_grad(self) -> None:
        """Drops the gradients of all optimizers of the loop, as the others' loops do."""
        for optimizer in self._watch.present.values():
            optimizer.zero_grad()

    # -- what is checked ------------------------------------------------------------------------

    def _refuse(self, *, divides_by_all: bool) -> None:
        counts_twice = divides_by_all and not self._exchange.weighting.is_even, _COUNTS_TWICE
        objections = (*self._ranks.objections(), *self._objections(), counts_twice)
        why = next((why for holds, why in objections if holds), None)
        if why is not None:
            raise RuntimeError(f"session.join(): {why}")

    def _objections(self) -> Iterator[tuple[bool, str]]:
        at, exchange = self._at, self._exchange
        yield not at.attached, "the session is detached: call og.distribute() again"
        in_it = self._attendance.join != Join.NONE
        yield in_it, "this loop is in it already; use one around the other"
        yield (
            len(at.group.attached) > 1,
            "several sessions are on this process group, and a site that has run out could not "
            "tell whose step is next: give each model a group of its own, "
            "og.distribute(model, group=dist.new_group()), or detach() those that are done",
        )
        yield (
            at.comm.min_sites is not None,
            "og.Star(when_lost='go on'): a site that has run out could not tell which step is void "
            "when another one is lost: use loops of equal length",
        )
        yield (
            exchange.joint is not None,
            "PerLayer(joint=True) needs a delta of every site in every step: use loops of equal "
            "length",
        )
        yield (
            bool(self._norms),
            f"{', '.join(self._norms[:1])!r} is a SyncBatchNorm, whose forward waits "
            "for all sites, also for those that have run out: use loops of equal length",
        )
        yield (
            not exchange.cadence.always,
            "a method with every=k shares nothing in most steps, in which the others could not "
            "hear that a site has run out: use every=1",
        )


def _follow_all(loops: Sequence[UnevenLoops]) -> None:
    """Joins the steps of the others of all sessions until all sites are out of all.

    Of outer ones the loop may go on then: it is as if it had just begun.

    Raises:
        RuntimeError: as the first of them did; its site joins no more steps of any.
    """
    turn, errors = Lock(), list[BaseException]()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def follow(loop: UnevenLoops) -> None:
        try:
            loop.follow(turn)
        except BaseException as error:
            errors.append(error)
            if not isinstance(error, ExchangeError):
                loop.leave()  # at once: the others would wait for it, and this site for them

    def follow_there(loop: UnevenLoops) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a thread begins with the first one
        follow(loop)

    *outer, own = loops
    threads = [Thread(target=follow_there, args=(one,), daemon=True) for one in outer]
    for thread in threads:
        thread.start()
    follow(own)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
