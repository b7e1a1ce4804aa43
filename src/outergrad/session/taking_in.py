"""Admission: sites that train admit one that joins, which receives their common state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from outergrad.capture.optimizer_steps import listen
from outergrad.comm.agree import agree
from outergrad.core.errors import BoardGoneError, ExchangeError, Failure
from outergrad.core.transport import Comm
from outergrad.session.capable import transport_lines
from outergrad.session.handover import Handover
from outergrad.session.inspect import Inspection
from outergrad.session.settings import Settings
from outergrad.session.state import arrived, known_to_all
from outergrad.session.verified import Verified

_LOG = logging.getLogger("outergrad")


class TakingIn(Verified):
    """Base of a session that admits sites which join while others train.

    All agree on the step before which the new sites take part (`step/pact.py`). No site leaves the
    old transport until all have made the same steps.
    """

    def __init__(
        self, inspection: Inspection, comm: Comm, fingerprint: int, settings: Settings
    ) -> None:
        super().__init__(inspection, comm, fingerprint, settings)
        self._lines: Sequence[str] = settings.lines
        self._inherited: dict[str, Any] = {}
        if comm.min_sites is not None:
            listen(self._seen)

    # -- on the sites that train ----------------------------------------------------------------

    def _take_in(self) -> None:
        """Admits joining sites, if this is the step before which they take part."""
        if self._comm.min_sites is None:
            return
        pact = self._group.pact
        with self._giving_up_behind("the other sites, before more take part"):
            try:
                if pact.is_turn(self._comm):
                    self._make_sure_of_all()
                    pact.turn(self._comm)
            except BoardGoneError as error:
                raise ExchangeError(str(error), kind=Failure.LOCAL) from error

    def _make_sure_of_all(self) -> None:
        """Waits until all have made the last step: no site may leave that others still need."""
        drift, patience_s = None, self._comm.patience_s
        if not self._votes.is_settled:
            drift = self._count_at_end(2 * patience_s, patience_s)
        self._compare_at_end(2 * patience_s, patience_s)
        if drift is not None:
            raise drift

    def _hand_over(self) -> None:
        """Sends the handover to the joining sites; writes nothing here, as a backward runs."""
        with self._giving_up_behind("those that have come"):
            comm = self._comm.sealed()
            try:
                agree(comm, [*self._lines, *transport_lines(self._comm)])
            except ValueError as error:  # the joining sites leave; it costs the others a step
                _LOG.warning("those that have come cannot take part: %s", error)
            else:
                self._handover().give(comm)

    def _handover(self) -> Handover:
        common = [known_to_all(state) for state in self._compressors.states()]
        replica = self._replica(self._buffers.tensors, self._seen.present, "")
        tensors = [*replica.parameters, *replica.buffers]
        return Handover(self._number, self._stats.step, tensors, common, replica.optimizer_states)

    # -- on a joining site ----------------------------------------------------------------------

    def take(self, found: Handover) -> None:
        """Takes over the handover; optimizers get their states before their first step.

        Raises:
            ExchangeError: the handover is of another model.
        """
        replica = self._replica(self._buffers.tensors, {}, "")
        mine = [*replica.parameters, *replica.buffers]
        if [t.shape for t in mine] != [t.shape for t in found.tensors]:
            raise ExchangeError("the others have parameters or buffers of other shapes", (0,))
        with torch.no_grad():
            for t, new in zip(mine, found.tensors, strict=True):
                t.copy_(new)
        own, sites = self._compressors.states(), self._comm.world_size
        self._compressors.load(arrived(own, found.compressors, self._owner, sites))
        self._stats = replace(self._stats, step=found.step)
        self._inherited = dict(found.optimizers)
        self._note_end(counted=False)

    def before_applying(self, optimizer: Optimizer) -> None:
        """Loads the state handed over into an optimizer before its first step."""
        super().before_applying(optimizer)
        name = self._seen.holder(optimizer) if self._inherited else None
        state = None if name is None else self._inherited.pop(name, None)
        if state is not None:
            self._replica([], {}, "").take_optimizer(optimizer, state)
