"""Replica check: replicas are compared every n steps, and made equal if the user asks for it."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from outergrad.capture.engine import NO_TASK, current_task
from outergrad.capture.optimizer_steps import SeenOptimizers, ignore, listen
from outergrad.core.errors import DriftError
from outergrad.core.transport import Comm
from outergrad.messages.raw import has_elements
from outergrad.session.drift import Drift, compared
from outergrad.session.inspect import Inspection
from outergrad.session.made_equal import ReplicaState
from outergrad.session.settings import Settings
from outergrad.session.watching import Watching
from outergrad.step.groups import lost_sites_told
from outergrad.step.repeated import RepeatedStep
from outergrad.step.step import SharedStep

_REMEDY = {
    "raise": "call session.make_equal() on every site to take site 0's and go on, or pass "
    "on_drift='mend' to og.distribute",
    "warn": "call session.make_equal() on every site to take site 0's",
    "mend": "all sites take site 0's",
}


class Verified(Watching):
    """Base of a session that compares replicas after every n-th shared step that counts."""

    def __init__(
        self, inspection: Inspection, comm: Comm, fingerprint: int, settings: Settings
    ) -> None:
        super().__init__(inspection, comm, fingerprint, settings)
        self._verify_every, self._on_drift = settings.verify_every, settings.on_drift
        self._unverified = 0
        self._shared = frozenset[str]()
        self._seen = SeenOptimizers(self._names())
        if self._verify_every is not None and self._several:
            listen(self._seen)

    def make_equal(self, *optimizers: Optimizer) -> bool:
        """Makes every replica equal to site 0's: shared parameters, buffers, optimizer states.

        Gradients that the last step shared become equal, too, if they have not been applied. Call
        it on every site at the same point of the program, not during backward. What is a site's
        own (`og.Local`) stays as it is. Takes one exchange of 40 bytes if nothing differs.

        Args:
            *optimizers: optimizers whose states are to be equal, too; with `verify_every` those
                that were seen to step are known.

        Returns:
            True if two sites differed.

        Raises:
            TypeError: an argument is no optimizer.
            RuntimeError: during backward, or the session is detached, or cannot do it.
            SiteLostError: another site does not arrive, or is gone.
        """
        self._refuse_make_equal()
        wrong = next((one for one in optimizers if not isinstance(one, Optimizer)), None)
        if wrong is not None:
            raise TypeError(
                f"session.make_equal(a {type(wrong).__name__}): pass optimizers, one after the "
                f"other: session.make_equal(first, second)"
            )
        if not self._several:
            return False
        self._require_group()
        with suppress(DriftError):  # which is mended below
            self._settle()
        self._votes.restart()
        given = {self._seen.holder(one): one for one in optimizers}
        known = {**self._seen.present, **{n: one for n, one in given.items() if n is not None}}
        with lost_sites_told(self._comm, "session.make_equal on all sites", self._stats.step):
            return self._whole_replica(known).make_equal(self._comm, 0)

    def _refuse_make_equal(self) -> None:
        if not self._attached or current_task() != NO_TASK:
            raise RuntimeError(
                "session.make_equal(): call it on an attached session, and not during backward"
            )

    def _whole_replica(self, optimizers: dict[str, Optimizer]) -> ReplicaState:
        tensors = [*self._buffers.tensors, *self._shared_gradients()]
        remedy = "pass it on every site: session.make_equal(optimizer)"
        return self._replica(tensors, dict(sorted(optimizers.items())), remedy)

    def _shared_gradients(self) -> list[Tensor]:
        """Gradients of the last step; replayed blocks compute them by each site's own weights."""
        shared = self._shared - self._unshared
        pairs = self._model.params.items()
        return [p.grad for name, p in pairs if name in shared and p.grad is not None]

    def move(self, comm: Comm) -> None:
        """Moves to another transport; counts anew, as the sites may differ in the last step."""
        super().move(comm)
        self._unverified = 0

    # -- after a step ---------------------------------------------------------------------------

    def _finish(self, step: Any) -> None:
        super()._finish(step)
        applied = isinstance(step, SharedStep) and step.applied
        self._shared = step.context.used if applied else frozenset()
        if applied:
            self._perhaps_verify()

    def _finish_repeated(self, step: RepeatedStep) -> None:
        super()._finish_repeated(step)
        self._shared = step.context.used
        if self._verify_every is not None:
            self._perhaps_verify()

    def _perhaps_verify(self) -> None:
        if self._verify_every is None or self._group.lost is not None:
            return
        self._unverified += 1
        if self._unverified >= self._verify_every:
            self._unverified = 0
            self._verify()

    def _verify(self) -> None:
        frozen = {name: p for name, p in self._frozen.items() if has_elements(p)}
        tensors: dict[str, Tensor | None] = {**self._model.params, **frozen}
        with self._giving_up_behind("the other sites' checksums"):
            drift = compared(self._comm, tensors | self._buffers.by_name)
            if drift is not None:
                self._tell_of_drift(drift)

    def _tell_of_drift(self, drift: Drift) -> None:
        step, first = self._stats.step, drift.names[0]
        self._mishaps.drifted(step, drift.sites, first)
        told = drift.told(step, self._remedy)
        if self._on_drift == "raise":
            raise DriftError(told, drift.sites, step, first)
        if self._on_drift == "mend":
            self._whole_replica(self._seen.present).make_equal(self._comm, 0)
        warnings.warn(told, RuntimeWarning, stacklevel=2)

    @property
    def _remedy(self) -> str:
        return _REMEDY[self._on_drift]

    def detach(self) -> None:
        """Stops watching optimizers for the replica check."""
        ignore(self._seen)
