"""Updates that a session shares: gradients of every backward, or changes of the weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from outergrad.capture.claims import GradientClaim
from outergrad.capture.optimizer_steps import SAID, ignore, listen
from outergrad.capture.uncounted import UncountedUpdates, told
from outergrad.core.errors import DriftError
from outergrad.core.types import StateDict
from outergrad.methods.local_steps import LocalSteps
from outergrad.record.coverage import Coverage, Travel
from outergrad.session.core import Core
from outergrad.session.elastic import Elastic
from outergrad.session.failure import FailureHandler
from outergrad.session.fragments import Fragments
from outergrad.session.inspect import Inspection
from outergrad.session.loop import BackwardLoop
from outergrad.session.outer_steps import OuterSteps
from outergrad.session.quorum_steps import QuorumSteps
from outergrad.step.cadence import Share, drift_told

if TYPE_CHECKING:
    from outergrad.session.session import Session

_MEND = "pass on_drift='mend' to og.distribute"


class SharedGradients:
    """Gradients of every backward are shared; `SharedChanges` is for `og.LocalSteps`.

    Attributes:
        remedies: what a user can do where replicas differ, by `on_drift`.
        follows_nodes: True if autograd's nodes of the shared parameters are those of the user's
            backward passes.
        are_own: True if each site has weights of its own between two exchanges.
        why_no_join: why loops cannot be joined, and the remedy; "" if they can.
        why_not_made_equal: why replicas are not to be made equal, and the remedy; "" if they are.
    """

    remedies: ClassVar = {
        "raise": f"call session.make_equal() on every site to take the first one's and go on, or "
        f"{_MEND}",
        "warn": "call session.make_equal() on every site to take the first one's",
        "mend": "all sites take the first one's",
    }
    follows_nodes, are_own = True, False
    why_no_join = why_not_made_equal = ""

    def attach(
        self, core: Core, failure: FailureHandler, elastic: Elastic, loop: BackwardLoop
    ) -> None:
        """Attaches to the parts of a session."""
        self._exchange = core.exchange

    def watch(self, model: nn.Module) -> None:
        """Shows the model to an outer optimizer, before the first update; here there is none."""

    def next_share(self) -> Share:
        """Returns what the next step of the other sites is about."""
        return self._exchange.whole

    def forget_gradients(self) -> None:
        """Drops gradients that were not shared, as the loops of the others do."""
        self._exchange.forget_gradients()

    def settle_first(self) -> None:
        """Finishes a step that has no backward, before one is abandoned whose backward raised."""

    def no_sync(self, shared: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Returns the context of `session.no_sync()`.

        Args:
            shared: leaves the gradients of this session's backward passes unshared.
        """
        return shared

    def flush(self, *, whole: bool) -> None:
        """Shares what is left to share."""

    def average(self, rounds: int | None) -> None:
        """Makes the weights of all sites their mean, with `og.Gossip`.

        Raises:
            RuntimeError: sites do not differ all through the training.
        """
        raise RuntimeError(
            "session.average() is for og.Gossip: with other methods all sites have the same "
            "weights, with og.LocalSteps after session.flush()"
        )

    def level(self) -> None:
        """Waits, before a state is saved, until all sites know of the same exchanges."""

    def stepped(self) -> bool:
        """Counts a step that no optimizer of the model made; True if weights have changed."""
        return False

    def refuse_join(self) -> None:
        """Raises RuntimeError if loops cannot be joined."""
        if self.why_no_join:
            raise RuntimeError(f"session.join(): {self.why_no_join}")

    def refuse_make_equal(self) -> None:
        """Raises RuntimeError if replicas are not to be equal now."""
        if self.why_not_made_equal:
            raise RuntimeError(f"session.make_equal(): {self.why_not_made_equal}")

    def explained(self, lines: Coverage) -> Coverage:
        """Adds to a coverage when what is shared."""
        return lines

    def state(self) -> StateDict:
        """Returns what a saved state says of updates under way."""
        return {}

    def load(self, state: StateDict) -> None:
        """Goes on from a saved state of this site."""

    def detach(self) -> None:
        """Lets go of the model."""

    def release(self) -> None:
        """Lets go of the model without a message."""

    def end(self) -> None:
        """Raises DriftError if that ended an exchange under way."""


class SharedChanges(SharedGradients):
    """Changes of the weights are shared after steps of the user's optimizers: `og.LocalSteps`.

    The user's backward passes share nothing.

    Args:
        inspection: of the model.
        method: says after how many steps the sites exchange.
        inner: averages the gradients of a site's ranks in every backward; None for one rank.
        shards: parameters of a sharded model, whose shards the inspection is about; None for a
            whole model.

    Attributes:
        inspection: as the argument, with the weights of the last exchange as its parameters.
        fragments: parts of the weights that take turns.
        outer: exchanges the changes.
    """

    remedies: ClassVar = {
        "raise": _MEND,
        "warn": _MEND,
        "mend": SharedGradients.remedies["mend"],
    }  # `make_equal()` is refused here
    follows_nodes, are_own = False, True  # backward passes are the user's own
    why_no_join = (
        "LocalSteps goes by the steps of each site's own optimizer, and a site that has run out "
        "makes none: let every site make the same number of steps, as by starting a shorter loader "
        "again"
    )
    why_not_made_equal = (
        "with LocalSteps every site has weights of its own between two exchanges: pass "
        "og.distribute(..., verify_every=n, on_drift='mend'), which makes equal what they have in "
        "common"
    )

    def __init__(
        self,
        inspection: Inspection,
        method: LocalSteps,
        inner: Session | None = None,
        shards: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self._trained, self._method, self._inner = dict(inspection.model.params), method, inner
        self._held = self._trained if shards is None else {n: shards[n] for n in self._trained}
        start = {n: nn.Parameter(p.detach().clone()) for n, p in self._trained.items()}
        self.inspection = replace(inspection, model=replace(inspection.model, params=start))
        self.fragments = Fragments(inspection.compressors.parts or [frozenset(start)])
        self._begun = False

    def attach(
        self, core: Core, failure: FailureHandler, elastic: Elastic, loop: BackwardLoop
    ) -> None:
        """Attaches to the parts of a session, and to the user's optimizers."""
        super().attach(core, failure, elastic, loop)
        self._at, start = core.at, self.inspection.model.params
        about = (self._trained, self._held, start, self._method, self.fragments)
        self.outer = outer = OuterSteps(*about, core, failure, elastic, loop)
        self._quorum: QuorumSteps | None = None
        if self._method.quorum is not None and core.at.comm.world_size > 1:
            own = self._trained, self.fragments.due, self._method
            self._quorum = QuorumSteps(outer, *own, core, failure, elastic)
        self._steps = outer if self._quorum is None else self._quorum
        told_of = (self._first_pass, self._refuse_uncounted)
        self._uncounted = UncountedUpdates(self._trained, self._method.fewest, *told_of)
        self._drift = core.exchange.drift
        noted = self._uncounted.on_gradient if self._drift is None else self._on_gradient
        self._claims = [GradientClaim(p, self, noted) for p in self._held.values()]
        listen(self)

    def watch(self, model: nn.Module) -> None:
        """Shows the model to the outer optimizer, before the first update."""
        self.outer.watch(model)

    def next_share(self) -> Share:
        """Returns what the next exchange is about."""
        return self.outer.next_share()

    def forget_gradients(self) -> None:
        """Keeps all: no backward leaves gradients in the shared weights."""

    def settle_first(self) -> None:
        """Finishes the exchange under way, before anything else is exchanged."""
        self.outer.receive()

    # -- what users call ------------------------------------------------------------------------

    def no_sync(self, shared: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Returns a context that leaves gradients unshared among the ranks of this site."""
        return shared if self._inner is None else self._inner.no_sync()

    def flush(self, *, whole: bool) -> None:
        """Shares the changes since the last exchange, if there are any.

        Args:
            whole: whether all that the sites owe travels along.

        Raises:
            RuntimeError: this site lost the others, or the weights have changed and no step was
                counted.
        """
        if not self._begun and (name := self._uncounted.since(self.outer.start)) is not None:
            self._refuse_uncounted(name, told(self._uncounted.passes))
        self._steps.flush(whole=whole)
        self._uncounted.restart()

    def level(self) -> None:
        """Waits until late sites have taken over what the others exchanged: they save that, too."""
        if self._quorum is not None:
            self._quorum.level()

    def stepped(self) -> bool:
        """Counts a step that no optimizer of the model made; True if weights have changed."""
        if not self._begun:
            self.outer.refuse_converted()
            self._begun = True
        return self._count(SAID)

    def explained(self, lines: Coverage) -> Coverage:
        """Says of each parameter that its change travels, and how often."""
        return Coverage(tuple(map(self._explained, lines)))

    def _explained(self, line: Travel) -> Travel:
        if line.parameter not in self._trained:
            return line
        why, reveals = (text.replace("gradient", "change") for text in (line.why, line.reveals))
        often = self._method.often + self.fragments.told(line.parameter)
        if self._quorum is not None:
            often, reveals = f"{often}, whole where a site is late", "this site's change"
        line = replace(line, why=f"change of the weights, {often}; {why}", reveals=reveals)
        return drift_told(line, self._method.k)

    def state(self) -> StateDict:
        """Returns the weights of the last exchange, the outer optimizer, and what is under way."""
        outer = self.outer
        outer.apply_failed()
        local_steps = {
            "start": {name: p.detach().clone() for name, p in outer.start.items()},
            "outer": copy.deepcopy(outer.optimizer.state_dict()),
            "made": dict(outer.counter.made),
            "turns": outer.state(),
        }
        return {"local_steps": local_steps}

    def load(self, state: StateDict) -> None:
        """Goes on from a saved state of this site, without its current weights."""
        found, outer = state["local_steps"], self.outer
        with torch.no_grad():
            for name, p in outer.start.items():
                p.copy_(found["start"][name])
        outer.optimizer.load_state_dict(copy.deepcopy(found["outer"]))
        outer.counter.resume(found["made"])
        self._begun = True
        self._uncounted.restart()
        outer.load(found.get("turns"))
        if self._quorum is not None:
            self._quorum.restart()

    def detach(self) -> None:
        """Lets go of the model and of the user's optimizers."""
        try:
            if self._inner is not None:
                self._inner.detach()
        finally:
            self._let_go()

    def release(self) -> None:
        """Lets go of the model without a message."""
        if self._inner is not None:
            self._inner.release()
        self._let_go()

    def _let_go(self) -> None:
        ignore(self)
        for claim in self._claims:
            claim.remove()

    def end(self) -> None:
        """Raises DriftError if that ended an exchange under way, which is not applied."""
        failed = self.outer.end()
        if isinstance(failed, DriftError):
            raise failed

    # -- what optimizers call -------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """Takes the weights of now as shared before the first step: they may have been loaded."""
        if self._begun or self.outer.counter.holder(optimizer) is None:
            return
        self._begun = True
        self.outer.refuse_converted()
        self.outer.start_here()

    def after_step(self, optimizer: Optimizer) -> None:
        """Counts a local step, after which an exchange may begin or be applied."""
        holder = self.outer.counter.holder(optimizer)
        if holder is not None:
            self._count(holder)

    def skipped_step(self, optimizer: Optimizer) -> None:
        """Counts a step that a `GradScaler` skipped here: the others' exchanges must not wait."""
        self.before_step(optimizer)
        self.after_step(optimizer)

    def _count(self, holder: str) -> bool:
        """Counts a step; returns whether an exchange was applied after it."""
        self._uncounted.restart()
        applied = self._steps.stepped(holder)
        if applied and SAID not in self.outer.counter.made:
            self._uncounted.exchanged(self.outer.counter.unheld)
        return applied

    # -- backward passes ------------------------------------------------------------------------

    def _on_gradient(self) -> None:
        """Notes the loss of a backward pass as well, for detectors of drift."""
        assert self._drift is not None
        self._uncounted.on_gradient()
        self._drift.note_loss()

    def _first_pass(self) -> None:
        """Copies the weights before a first backward, in case `stepped()` counts its step."""
        if not self._begun:
            self.outer.start_here()

    def _refuse_uncounted(self, name: str, why: str) -> None:
        raise RuntimeError(f"LocalSteps: {self._at.me.called} {why.format(name=repr(name))}")
