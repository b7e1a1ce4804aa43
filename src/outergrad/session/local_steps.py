"""Sessions of `og.LocalSteps`: sites make their own steps and share the change of their weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from outergrad.capture.claims import Claim
from outergrad.capture.optimizer_steps import SAID, ignore, listen
from outergrad.capture.uncounted import UncountedUpdates, told
from outergrad.core.errors import DriftError
from outergrad.core.transport import Comm
from outergrad.core.types import StateDict
from outergrad.methods.local_steps import LocalSteps
from outergrad.record.coverage import Coverage, Travel
from outergrad.session.fragments import Fragments
from outergrad.session.inspect import Inspection
from outergrad.session.outer_steps import OuterSteps
from outergrad.session.ranks import OneRank
from outergrad.session.session import Session
from outergrad.session.settings import Settings
from outergrad.step.cadence import Share


class LocalStepsSession(Session):
    """Session that shares changes of weights after steps of the user's optimizers.

    The user's backward passes share nothing.

    Args:
        inspection: as for `Session`.
        comm: as for `Session`.
        fingerprint: as for `Session`.
        settings: as for `Session`.
        method: says after how many steps the sites exchange.
        ranks: as for `Session`.
        inner: averages the gradients of a site's ranks in every backward; None for one rank.
    """

    _remedies: ClassVar = {
        **dict.fromkeys(("raise", "warn"), "pass on_drift='mend' to og.distribute"),
        "mend": Session._remedies["mend"],
    }  # `make_equal()` is refused here
    _follows_nodes = False  # backward passes are the user's own

    def __init__(
        self,
        inspection: Inspection,
        comm: Comm,
        fingerprint: int,
        settings: Settings,
        method: LocalSteps,
        ranks: OneRank | None = None,
        inner: Session | None = None,
    ) -> None:
        trained = dict(inspection.model.params)
        start = {n: nn.Parameter(p.detach().clone()) for n, p in trained.items()}
        shared = replace(inspection, model=replace(inspection.model, params=start))
        super().__init__(shared, comm, fingerprint, settings, ranks)
        self._trained, self._method, self._inner = trained, method, inner
        self._fragments = Fragments(inspection.compressors.parts or [frozenset(start)])
        about = (trained, start, method, self._fragments)
        self._outer = OuterSteps(*about, self._core, self._failure, self._elastic, self._loop)
        self._begun = False
        self._claims = [Claim(p, self) for p in trained.values()]
        told_of = (self._first_pass, self._refuse_uncounted)
        self._uncounted = UncountedUpdates(trained, method.k, *told_of)
        listen(self)

    def _next_share(self) -> Share:
        return self._outer.next_share()

    def _forget_gradients(self) -> None:
        """Keeps all: no backward leaves gradients in the shared weights."""

    def _settle_first(self) -> None:
        """Finishes the exchange under way, before anything else is exchanged."""
        self._outer.receive()

    # -- what users call ------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As `Session.no_sync`, among the ranks of this site."""
        with (self._inner or super()).no_sync():
            yield

    def flush(self) -> None:
        """Shares the changes since the last exchange, if there are any: at the end of training.

        Call it on every site, after the same number of steps. Then all have the same weights.

        Raises:
            RuntimeError: this site lost the others, or the weights have changed and no step was
                counted.
        """
        if self._at.attached:
            if not self._begun and (name := self._uncounted.since(self._outer.start)) is not None:
                self._refuse_uncounted(name, told(self._uncounted.passes))
            self._outer.flush()
            self._uncounted.restart()
        super().flush()

    def stepped(self) -> bool:
        """Counts a step of this site that no `torch.optim` optimizer of the model made.

        For updates written by hand, optimizers that are no `torch.optim.Optimizer`, and weights
        that are copied from others: float32 masters, one flat tensor. Call it on every site after
        each such update, or in place of a step that this site skips. Do not call it beside a step
        of a `torch.optim` optimizer, which is counted by itself.

        Returns:
            True if an exchange has just changed the weights. Where they are copies, copy them back
            to their masters then, and after `flush()`; else the next update undoes the exchange.
        """
        if not self._at.attached:
            return False
        if not self._begun:
            self._outer.refuse_converted()
            self._begun = True
        return self._count(SAID)

    def join(
        self,
        *,
        step: Callable[[], Any] | None = None,
        divide_by_initial_world_size: bool = False,
    ) -> AbstractContextManager[None]:
        """Raises: an exchange follows k steps of each site, and one that has run out makes none.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "session.join(): LocalSteps goes by the steps of each site's own optimizer, and a site "
            "that has run out makes none: let every site make the same number of steps, as by "
            "starting a shorter loader again"
        )

    def _refuse_make_equal(self) -> None:
        self._ranks.refuse_make_equal()
        raise RuntimeError(
            "session.make_equal(): with LocalSteps every site has weights of its own between two "
            "exchanges: pass og.distribute(..., verify_every=n, on_drift='mend'), which makes "
            "equal what they have in common"
        )

    def coverage(self) -> Coverage:
        """Returns how the change of each parameter travels and why."""
        return Coverage(tuple(map(self._explained, super().coverage())))

    def _explained(self, line: Travel) -> Travel:
        if line.parameter not in self._trained:
            return line
        why, reveals = (text.replace("gradient", "change") for text in (line.why, line.reveals))
        k = self._method.k
        often = "every step" if k == 1 else f"every {k} steps"
        often += self._fragments.told(line.parameter)
        return replace(line, why=f"change of the weights, {often}; {why}", reveals=reveals)

    def state_dict(self) -> StateDict:
        """Returns the session's state, with the weights of the last exchange and outer optimizer.

        Otherwise as `Session.state_dict`. It may be saved between two exchanges, too, beside each
        site's own model and optimizer. An exchange under way is waited for, and applied when it
        would have been.
        """
        state, outer = super().state_dict(), self._outer
        outer.apply_failed()
        local_steps = {
            "start": {name: p.detach().clone() for name, p in outer.start.items()},
            "outer": copy.deepcopy(outer.optimizer.state_dict()),
            "made": dict(outer.counter.made),
            "turns": outer.state(),
        }
        return {**state, "local_steps": local_steps}

    def load_state_dict(self, state: StateDict | Sequence[StateDict]) -> None:
        """Goes on from saved states, as `Session.load_state_dict`.

        Each site's current weights are not in them: load these with the model. With fewer sites
        than before, what the missing ones have changed since the last exchange is lost: for another
        number of sites save after `flush()`.
        """
        super().load_state_dict(state)
        rank, outer = self._at.comm.rank, self._outer
        own = state if isinstance(state, dict) else state[rank % len(state)]
        found = own["local_steps"]
        with torch.no_grad():
            for name, p in outer.start.items():
                p.copy_(found["start"][name])
        outer.optimizer.load_state_dict(copy.deepcopy(found["outer"]))
        outer.counter.resume(found["made"])
        self._begun = True
        self._uncounted.restart()
        outer.load(found.get("turns"))

    def detach(self) -> None:
        """Ends the session: each site keeps the weights that it has.

        Call `flush()` before to make them equal. An exchange under way is waited for, and not
        applied.
        """
        try:
            if self._inner is not None:
                self._inner.detach()
        finally:
            ignore(self)
            self._uncounted.remove()
            for claim in self._claims:
                claim.remove()
            super().detach()
        failed = self._outer.end()
        if isinstance(failed, DriftError):
            raise failed

    # -- what optimizers call -------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """Takes the weights of now as shared before the first step: they may have been loaded."""
        if self._begun or self._outer.counter.holder(optimizer) is None:
            return
        self._begun = True
        self._outer.refuse_converted()
        self._outer.start_here()

    def after_step(self, optimizer: Optimizer) -> None:
        """Counts a local step, after which an exchange may begin or be applied."""
        holder = self._outer.counter.holder(optimizer)
        if holder is not None:
            self._count(holder)

    def skipped_step(self, optimizer: Optimizer) -> None:
        """Counts a step that a `GradScaler` skipped here: the others' exchanges must not wait."""
        self.before_step(optimizer)
        self.after_step(optimizer)

    def _count(self, holder: str) -> bool:
        """Counts a step; returns whether an exchange was applied after it."""
        self._uncounted.restart()
        applied = self._outer.stepped(holder)
        if applied and SAID not in self._outer.counter.made:
            self._uncounted.exchanged(self._outer.counter.unheld)
        return applied

    # -- steps that nobody counted --------------------------------------------------------------

    def _first_pass(self) -> None:
        """Copies the weights before a first backward, in case `stepped()` counts its step."""
        if not self._begun:
            self._outer.start_here()

    def _refuse_uncounted(self, name: str, why: str) -> None:
        raise RuntimeError(f"LocalSteps: site {self._at.comm.rank} {why.format(name=repr(name))}")
