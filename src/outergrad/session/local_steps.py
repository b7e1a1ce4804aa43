"""Session of `og.LocalSteps`: sites step by themselves and share how their weights changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from outergrad.capture.changes import ModelWatch
from outergrad.capture.claims import Claim
from outergrad.capture.optimizer_steps import SAID, ignore, listen
from outergrad.capture.uncounted import UncountedUpdates, told
from outergrad.core.errors import DriftError
from outergrad.core.transport import Comm
from outergrad.core.types import StateDict
from outergrad.methods.local_steps import LocalSteps
from outergrad.record.coverage import Coverage, Travel
from outergrad.session.exchanging import Exchanging
from outergrad.session.inspect import Inspection
from outergrad.session.settings import Settings


class LocalStepsSession(Exchanging):
    """Session that exchanges weight changes after some steps of a model's optimizers.

    The other sites hear nothing of the user's backward passes.
    """

    def __init__(
        self,
        inspection: Inspection,
        comm: Comm,
        fingerprint: int,
        settings: Settings,
        method: LocalSteps,
    ) -> None:
        super().__init__(inspection, comm, fingerprint, settings, method)
        self._begun = False
        self._claims = [Claim(p, self) for p in self._trained.values()]
        told_of = (self._first_pass, self._refuse_uncounted)
        self._uncounted = UncountedUpdates(self._trained, method.k, *told_of)
        listen(self)

    # -- public ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Shares the changes since the last exchange, if there are any: at the end of training.

        Call it on every site, after the same number of steps. Then all have the same weights.

        Raises:
            RuntimeError: this site lost the others, or the weights have changed and no step was
                counted.
        """
        if self._attached:
            if not self._begun and (name := self._uncounted.since(self._start)) is not None:
                self._refuse_uncounted(name, told(self._uncounted.passes))
            self._apply()
            if self._counter.any_made:
                self._count_samples()
            while self._fragments.seek():
                self._send(overlaps=False)
                self._apply(ends=True)
            self._counter.restart()
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
        if not self._attached:
            return False
        if not self._begun:
            self._refuse_converted()
            self._begun = True
        return self._count(SAID)

    @contextmanager
    def join(
        self,
        *,
        step: Callable[[], Any] | None = None,
        divide_by_initial_world_size: bool = False,
    ) -> Iterator[None]:
        """Raises: an exchange follows k steps of each site, and one that has run out makes none.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "session.join(): LocalSteps goes by the steps of each site's own optimizer, and a site "
            "that has run out makes none: let every site make the same number of steps, as by "
            "starting a shorter loader again"
        )
        yield

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
        state = super().state_dict()
        if self._failed is not None:
            self._apply()
        local_steps = {
            "start": {name: p.detach().clone() for name, p in self._start.items()},
            "outer": copy.deepcopy(self._outer.state_dict()),
            "made": dict(self._counter.made),
            "turns": self._turns(),
        }
        return {**state, "local_steps": local_steps}

    def load_state_dict(self, state: StateDict | Sequence[StateDict]) -> None:
        """Goes on from saved states, as `Session.load_state_dict`.

        Each site's current weights are not in them: load these with the model. With fewer sites
        than before, what the missing ones have changed since the last exchange is lost: for another
        number of sites save after `flush()`.
        """
        super().load_state_dict(state)
        rank = self._comm.rank
        own = state if isinstance(state, dict) else state[rank % len(state)]
        found = own["local_steps"]
        with torch.no_grad():
            for name, p in self._start.items():
                p.copy_(found["start"][name])
        self._outer.load_state_dict(copy.deepcopy(found["outer"]))
        self._counter.made, self._begun = dict(found["made"]), True
        self._uncounted.restart()
        self._load_turns(found.get("turns"))

    def detach(self) -> None:
        """Ends the session: each site keeps the weights that it has.

        Call `flush()` before to make them equal. An exchange under way is waited for, and not
        applied.
        """
        ignore(self)
        self._uncounted.remove()
        for claim in self._claims:
            claim.remove()
        super().detach()
        failed, self._failed = self._failed, None
        if isinstance(failed, DriftError):
            raise failed

    # -- hooks of optimizers --------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """Takes the weights of now as shared before the first step: they may have been loaded."""
        if self._begun or self._counter.holder(optimizer) is None:
            return
        self._begun = True
        self._refuse_converted()
        self._start_here()

    def after_step(self, optimizer: Optimizer) -> None:
        """Counts a local step, after which an exchange may begin or be applied."""
        holder = self._counter.holder(optimizer)
        if holder is not None:
            self._count(holder)

    def skipped_step(self, optimizer: Optimizer) -> None:
        """Counts a step that a `GradScaler` skipped here: the others' exchanges must not wait."""
        self.before_step(optimizer)
        self.after_step(optimizer)

    def _count(self, holder: str) -> bool:
        """Counts a step; True if an exchange was applied after it."""
        self._counter.count(holder)
        self._uncounted.restart()
        self._fragments.stepped()
        applied = False
        if self._counter.reached(self._method.overlap):
            applied = self._apply()
        if self._counter.due:
            self._count_samples()
            self._send(overlaps=self._method.overlap > 0)
            if not self._method.overlap:
                applied = self._apply()
        if applied and SAID not in self._counter.made:
            self._uncounted.exchanged(self._counter.unheld)
        return applied

    # -- uncounted steps ------------------------------------------------------------------------

    def _first_pass(self) -> None:
        """Takes the weights of now as shared: a `stepped()` after this backward begins at them."""
        if not self._begun:
            self._start_here()

    @torch.no_grad()
    def _start_here(self) -> None:
        for name, p in self._start.items():
            p.copy_(self._trained[name])

    def _refuse_uncounted(self, name: str, why: str) -> None:
        raise RuntimeError(f"LocalSteps: site {self._comm.rank} {why.format(name=repr(name))}")

    def _follow_nodes(self, watch: ModelWatch) -> None:
        """Does nothing: no backward is shared, and conversions are refused at the exchange."""

    @property
    def _remedy(self) -> str:
        mends = self._on_drift == "mend"
        return super()._remedy if mends else "pass on_drift='mend' to og.distribute"

    def _refuse_make_equal(self) -> None:
        raise RuntimeError(
            "session.make_equal(): with LocalSteps every site has weights of its own between two "
            "exchanges: pass og.distribute(..., verify_every=n, on_drift='mend'), which makes "
            "equal what they have in common"
        )
