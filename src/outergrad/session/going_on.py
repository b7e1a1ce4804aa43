"""Resuming of a session with other sites, after some were lost or have joined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outergrad.core.errors import ExchangeError, Failure, SiteLostError
from outergrad.core.transport import Comm
from outergrad.methods.local_steps import LocalSteps
from outergrad.session.backward_hooks import BackwardHooks
from outergrad.session.farewell import end_session, say_farewell
from outergrad.session.inspect import Inspection
from outergrad.session.pricing import settle_again
from outergrad.session.state import survived
from outergrad.step import param_grad
from outergrad.step.groups import end_unfinished, note_lost, on_transport
from outergrad.step.lost import Findings


class GoingOn(BackwardHooks):
    """Base of a session that moves from one transport to the next.

    Where the loss of a site was noticed, nothing more is exchanged: each site derives its new state
    from what the sites have agreed on. The loop hears of it by an error in the step that does not
    count, or, on a site that had not begun that step, when it begins it. The step after goes on
    with the others.
    """

    def _require_step(self) -> None:
        """Ends unfinished steps, and raises if the sites have changed, before a step begins.

        Raises:
            SitesChangedError: the sites have changed, and this step is void.
            SiteLostError: the transport cannot be used any more.
        """
        if self._group.is_calm and self._comm.min_sites is None:
            return
        end_unfinished(self._comm.key)
        self._hear_of_end()
        self._take_in()
        self._tell_of_change()
        self._refuse_lost()
        self._tell_of_change()

    def _tell_of_change(self) -> None:
        group = self._group
        told, group.untold = group.untold, None
        if told is not None:
            self._drop_pass()
            raise told

    def go_on(self) -> None:
        """Moves to the next transport now, if the sites have agreed on one.

        Whatever else uses the session's transport calls this first.

        Raises:
            SiteLostError: the transport cannot be used any more.
        """
        self._require_group()

    def _drop_pass(self) -> None:
        """Drops what this backward, and those in `no_sync` before it, have left."""
        self._accumulator.clear()
        self._unshared.clear()
        param_grad.drop(self._model.params.values())
        self._forget_pass(None)

    def _go_on(self) -> None:
        """Moves all sessions of the transport to the next one, between two steps."""
        before = self._group
        opens, before.pact.opens = before.pact.opens, None
        assert opens is not None
        sessions = {self, *before.attached}
        try:
            comms = {session: opens() for session in sessions}
        except RuntimeError as error:
            cause = ExchangeError(str(error), kind=Failure.TRANSPORT)
            raise (before.lost or self._lost_with(cause)).again() from error
        for session, comm in comms.items():
            session.move(comm)
        after = self._group
        after.count, after.untold = before.count, before.untold
        if self._comm.coming:
            self._hand_over()

    def _lost_with(self, error: ExchangeError) -> SiteLostError:
        place, nobody = "the sites that go on", Findings(())
        return note_lost(self._comm, self._stats.step, place, error, nobody)

    def _take_in(self) -> None:
        raise NotImplementedError

    def _hand_over(self) -> None:
        raise NotImplementedError

    def move(self, comm: Comm) -> None:
        """Moves this session to another transport; `comm` is this session's own."""
        before, sites = self._comm, comm.world_size
        if self._lost_step is None:
            self._tell_part(self._stats.step)
        step = self._stats.step if self._lost_step is None else self._lost_step
        self._planner.commit(applied=False)
        states = self._compressors.states()
        known = {name: rank for rank, name in enumerate(before.names)}
        predecessors = [known.get(name, 0) for name in comm.names]
        self._comm, self._group = comm, on_transport(comm.key)
        self._lost_step = self._pattern = None
        comm.sent_bytes, comm.received_bytes = before.sent_bytes, before.received_bytes
        settle_again(self._compressors, self._model, comm)
        weight = sites / before.world_size
        self._compressors.load(survived(states, self._owner, predecessors, weight, comm.device))
        self._owner = replace(self._owner, rank=comm.rank, sites=sites)
        self._planner.begin_anew(comm.cost)
        self._header_builder.move(comm)
        self._votes.restart()
        self._stats = replace(self._stats, step=step)
        self._join_registry(before)
        self._reporter.sites_changed(step, comm)

    def _join_registry(self, before: Comm) -> None:
        end_session(before)
        on_transport(before.key).attached.discard(self)
        group = self._group
        group.attached.add(self)
        self._note_end(counted=False)
        group.watch(self._comm)
        say_farewell(self._comm, self._number)


def refuse_to_go_on(comm: Comm, method: Any, inspection: Inspection) -> None:
    """Raises ValueError if sites go on without lost ones, and the method cannot do that."""
    if comm.min_sites is None:
        return
    why = ""
    if isinstance(method, LocalSteps):
        why = "with LocalSteps sites differ between two exchanges"
    elif inspection.compressors.chooser is not None:
        why = "og.Auto goes by times that a site may not have heard: name a method, as og.DAD()"
    elif any(k > 1 for k in inspection.every.values()):
        why = "with every=k sites may differ in how many passes they count: use every=1"
    if why:
        raise ValueError(f"og.Star(when_lost='go on') does not go with method={method!r}: {why}")
