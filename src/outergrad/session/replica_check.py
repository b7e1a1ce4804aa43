"""Compares replicas now and then, and makes them equal where the user asks for it."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from contextlib import suppress

from torch import Tensor
from torch.optim import Optimizer

from outergrad.capture.optimizer_steps import SeenOptimizers, ignore, listen
from outergrad.core.errors import DriftError
from outergrad.session.after_step import StepOutcome
from outergrad.session.core import Core
from outergrad.session.drift import Drift, OnDrift
from outergrad.session.failure import FailureHandler
from outergrad.session.final_barrier import FinalBarrier
from outergrad.session.made_equal import ReplicaState
from outergrad.step.transport_state import lost_sites_told


class ReplicaCheck:
    """Compares replicas after every n-th shared step that counts.

    Args:
        core: the session's.
        failure: aborts the transport if it fails.
        barrier: makes sure that all sites have made the last step.
        seen: the optimizers that were seen to step.
        every: n; None for never.
        on_drift: what to do about a difference.
        remedy: what the user can do about it, in words.
    """

    def __init__(
        self,
        core: Core,
        failure: FailureHandler,
        barrier: FinalBarrier,
        seen: SeenOptimizers,
        every: int | None,
        on_drift: OnDrift,
        remedy: str,
    ) -> None:
        self._exchange, self._at, self._mishaps = core.exchange, core.at, core.mishaps
        self._ranks = core.ranks
        self._failure, self._barrier, self._seen = failure, barrier, seen
        self._every, self._on_drift, self._remedy = every, on_drift, remedy
        self._unverified = 0
        self._shared: Collection[str] = frozenset()
        if every is not None and core.exchange.several:
            listen(seen)

    def follow(self, outcome: StepOutcome) -> None:
        """Compares the replicas after a step, if it is time."""
        self._shared = outcome.shared
        if not outcome.applied or self._every is None or self._at.is_lost:
            return
        self._unverified += 1
        if self._unverified >= self._every:
            self._unverified = 0
            self._verify()

    def refuse_other(self, given: Collection[object]) -> None:
        """Raises TypeError if something else than optimizers is to be made equal."""
        wrong = next((one for one in given if not isinstance(one, Optimizer)), None)
        if wrong is not None:
            raise TypeError(
                f"session.make_equal(a {type(wrong).__name__}): pass optimizers, one after the "
                f"other: session.make_equal(first, second)"
            )

    def make_equal(self, optimizers: Collection[Optimizer]) -> bool:
        """Makes every replica that of site 0; returns whether two sites differed.

        Raises:
            SiteLostError: another site does not come, or went.
        """
        with suppress(DriftError):
            self._barrier.settle()
        self._exchange.votes.restart()
        given = {self._seen.holder(one): one for one in optimizers}
        known = {**self._seen.present, **{n: one for n, one in given.items() if n is not None}}
        with lost_sites_told(self._at.comm, "session.make_equal on all sites", self._at.stats.step):
            return self._ranks.make_all_equal(self._whole_replica(known))

    def move(self) -> None:
        """Starts counting anew on another transport: not all sites may have counted the last."""
        self._unverified = 0

    def detach(self) -> None:
        """Ends the comparing."""
        ignore(self._seen)

    def _verify(self) -> None:
        exchange = self._exchange
        tensors: dict[str, Tensor | None] = {
            **exchange.replicated,
            **exchange.frozen_with_elements,
            **exchange.buffers.by_name,
        }
        with self._failure.guard_between("the other sites' checksums"):
            drift = self._ranks.compared(tensors)
            if drift is not None:
                self._tell_of_drift(drift)

    def _tell_of_drift(self, drift: Drift) -> None:
        step, first = self._at.stats.step, drift.names[0]
        self._mishaps.drifted(step, drift.sites, first)
        told = drift.told(step, self._remedy)
        if self._on_drift == "raise":
            raise DriftError(told, drift.sites, step, first)
        if self._on_drift == "mend":
            self._ranks.make_all_equal(self._whole_replica(self._seen.present))
        warnings.warn(told, RuntimeWarning, stacklevel=2)

    def _whole_replica(self, optimizers: dict[str, Optimizer]) -> ReplicaState:
        tensors = [*self._exchange.buffers.tensors, *self._shared_gradients()]
        remedy = "pass it on every site: session.make_equal(optimizer)"
        return self._exchange.replica(tensors, dict(sorted(optimizers.items())), remedy)

    def _shared_gradients(self) -> list[Tensor]:
        """Returns gradients of the last step: blocks depend on each site's own weights."""
        shared = set(self._shared) - self._exchange.unshared
        pairs = self._exchange.replicated.items()
        return [p.grad for name, p in pairs if name in shared and p.grad is not None]
