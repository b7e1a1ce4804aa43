"""Moves of a session to other sites: some were lost, others have come."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from outergrad.capture.optimizer_steps import SeenOptimizers, listen
from outergrad.comm.agree import agree
from outergrad.commit.lost import Findings
from outergrad.core.errors import BoardGoneError, ExchangeError, Failure
from outergrad.core.sites import called
from outergrad.core.transport import Comm
from outergrad.methods.local_steps import LocalSteps
from outergrad.session.capable import transport_lines
from outergrad.session.core import Core
from outergrad.session.failure import FailureHandler
from outergrad.session.farewell import end_session, say_farewell
from outergrad.session.final_barrier import FinalBarrier
from outergrad.session.handover import Handover
from outergrad.session.inspect import Inspection
from outergrad.session.pricing import settle_again
from outergrad.session.state import arrived, known_to_all, survived
from outergrad.step.transport_state import end_unfinished, note_lost, on_transport, refuse_lost

_LOG = logging.getLogger("outergrad")


class Elastic:
    """Moves a session from one transport to the next.

    Where the loss of a site was noticed, nothing is exchanged: what follows for each site follows
    from what they have agreed on. The training loop is told in the step that does not count, or,
    on a site that had not begun it, when it begins. The next step continues with the others.

    Sites that come are admitted before a step that all agree on (`commit/participant.py`);
    nobody leaves the transport of before until all have made the same steps.

    Args:
        session: the session, as its group knows it.
        core: the session's.
        failure: aborts the transport if it fails.
        barrier: makes sure that all sites have made the last step.
        seen: the optimizers that were seen to step.
        lines: what a site that comes must agree on.
    """

    def __init__(
        self,
        session: Any,
        core: Core,
        failure: FailureHandler,
        barrier: FinalBarrier,
        seen: SeenOptimizers,
        lines: Sequence[str],
    ) -> None:
        self._session, self._exchange, self._at = session, core.exchange, core.at
        self._failure, self._barrier, self._reporter = failure, barrier, core.reporter
        self._seen, self._lines = seen, lines
        self._inherited: dict[str, Any] = {}
        if core.at.comm.min_sites is not None:
            listen(seen)

    # -- before the transport is used -----------------------------------------------------------

    def require_group(self) -> None:
        """Ends steps whose backward raised, so that all sites are in step again.

        Raises:
            SiteLostError: the transport must not be used any more.
        """
        end_unfinished(self._at.comm.key)
        self._refuse_lost()

    def require_step(self) -> None:
        """Does so before a step, and tells the training loop that the sites have changed.

        Raises:
            SitesChangedError: they have, and this step is void.
            SiteLostError: the transport must not be used any more.
        """
        if self._at.group.is_calm and self._at.comm.min_sites is None:
            return
        end_unfinished(self._at.comm.key)
        self._failure.poll_abort()
        self._admit()
        self._tell_of_change()
        self._refuse_lost()
        self._tell_of_change()

    def _tell_of_change(self) -> None:
        group = self._at.group
        told, group.untold = group.untold, None
        if told is not None:
            self._exchange.forget_gradients(own=False)
            self._exchange.forget_pass(None)
            raise told

    def _refuse_lost(self) -> None:
        self._failure.poll_abort()
        while self._at.group.participant.opens is not None:  # more sites may be lost meanwhile
            self._go_on()
        refuse_lost(self._at.comm.key)

    # -- with fewer sites or more -----------------------------------------------------------------

    def _go_on(self) -> None:
        """Moves all sessions of the transport, between two steps."""
        before, key = self._at.group, self._at.comm
        opens, before.participant.opens = before.participant.opens, None
        assert opens is not None
        sessions = {self._session, *before.attached}
        try:
            comms = {session: opens() for session in sessions}
        except RuntimeError as error:
            cause = ExchangeError(str(error), kind=Failure.TRANSPORT)
            place, nobody = "the sites that go on", Findings(())
            lost = before.lost or note_lost(key, self._at.stats.step, place, cause, nobody)
            raise lost.again() from error
        for session, comm in comms.items():
            session.move(comm)
        after = self._at.group
        after.count, after.untold = before.count, before.untold
        if self._at.comm.coming:
            self._hand_over()

    def move(self, comm: Comm) -> None:
        """Continues on another transport; `comm` is this session's own."""
        exchange, at, before = self._exchange, self._at, self._at.comm
        if at.lost_step is None:
            self._failure.tell_part(at.stats.step)
        exchange.planner.commit(applied=False)
        states = exchange.compressors.states()
        known = {name: rank for rank, name in enumerate(before.names)}
        predecessors = [known.get(name, 0) for name in comm.names]
        step = at.move(comm)
        settle_again(exchange.compressors, exchange.model, comm)
        weight = comm.world_size / before.world_size
        kept = survived(states, exchange.owner, predecessors, weight, comm.device)
        exchange.compressors.load(kept)
        exchange.move(comm)
        end_session(before)
        on_transport(before.key).attached.discard(self._session)
        at.group.attached.add(self._session)
        at.note_end(counted=False)
        at.group.watch(comm)
        say_farewell(comm, at.number)
        self._reporter.sites_changed(step, before, comm)

    # -- on the sites that admit others -----------------------------------------------------------

    def _admit(self) -> None:
        """Leaves the transport if others have come, and this is the step before which they join."""
        if self._at.comm.min_sites is None:
            return
        participant = self._at.group.participant
        with self._failure.guard_between("the other sites, before more take part"):
            try:
                if participant.is_join_due(self._at.comm):
                    self._barrier.settle_with_all()
                    participant.join(self._at.comm)
            except BoardGoneError as error:
                raise ExchangeError(str(error), kind=Failure.LOCAL) from error

    def _hand_over(self) -> None:
        """Sends the state of training to the sites that have come, from copies.

        A backward runs, which needs everything as it was.
        """
        with self._failure.guard_between("those that have come"):
            comm = self._at.comm.sealed()
            try:
                agree(comm, [*self._lines, *transport_lines(self._at.comm)])
            except ValueError as error:  # they leave; it costs the others a step
                coming = called([self._at.comm.sites[rank] for rank in self._at.comm.coming])
                _LOG.warning("%s cannot take part: %s", coming, error)
            else:
                self._handover().give(comm)

    def _handover(self) -> Handover:
        exchange, at = self._exchange, self._at
        common = [known_to_all(state) for state in exchange.compressors.states()]
        replica = exchange.replica(exchange.buffers.tensors, self._seen.present, "")
        tensors = [*replica.parameters, *replica.buffers]
        return Handover(at.number, at.stats.step, tensors, common, replica.optimizer_states)

    # -- on a site that comes ---------------------------------------------------------------------

    def take(self, found: Handover) -> None:
        """Takes the state of training; optimizers take theirs before their first step.

        Raises:
            ExchangeError: it is of another model.
        """
        exchange, sites = self._exchange, self._at.comm.world_size
        replica = exchange.replica(exchange.buffers.tensors, {}, "")
        mine = [*replica.parameters, *replica.buffers]
        if [t.shape for t in mine] != [t.shape for t in found.tensors]:
            raise ExchangeError("the others have parameters or buffers of other shapes", (0,))
        with torch.no_grad():
            for t, new in zip(mine, found.tensors, strict=True):
                t.copy_(new)
        own = exchange.compressors.states()
        exchange.compressors.load(arrived(own, found.compressors, exchange.owner, sites))
        self._inherited = dict(found.optimizers)
        self._at.admit(found.step)

    def before_applying(self, optimizer: Optimizer) -> None:
        """Gives an optimizer the state that this site was sent for it, before its first step."""
        name = self._seen.holder(optimizer) if self._inherited else None
        state = None if name is None else self._inherited.pop(name, None)
        if state is not None:
            self._exchange.replica([], {}, "").take_optimizer(optimizer, state)


def refuse_to_go_on(comm: Comm, method: Any, inspection: Inspection) -> None:
    """Checks a method, where sites continue without others.

    Raises:
        ValueError: the method cannot do that.
    """
    if comm.min_sites is None:
        return
    why = ""
    if isinstance(method, LocalSteps):
        why = "with LocalSteps sites differ between two exchanges"
    elif inspection.compressors.chooser is not None:
        why = "og.Auto goes by times that a site may not have heard: name a method, as og.DAD()"
    elif any(k != 1 for k in inspection.every.values()):
        why = "with every=k sites may differ in how many passes they count: use every=1"
    if why:
        raise ValueError(f"og.Star(when_lost='go on') does not go with method={method!r}: {why}")
