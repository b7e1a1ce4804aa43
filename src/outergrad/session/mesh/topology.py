"""Topology of a session over a mesh, whose sites have several ranks each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from outergrad.capture.changes import ModelWatch
from outergrad.comm.agree import broadcast_all, fingerprint
from outergrad.core.protocols import Rules
from outergrad.core.transport import Capability
from outergrad.methods.dense import Dense
from outergrad.methods.local_steps import LocalSteps
from outergrad.session.capable import refuse_lacking
from outergrad.session.description import shared_tensors
from outergrad.session.fragments import streamed
from outergrad.session.inspect import Inspection, inspect
from outergrad.session.mesh.levels import Levels, Mesh
from outergrad.session.mesh.ranks import ranks_named
from outergrad.session.mesh.refusals import of_inspection, of_method, of_settings, refuse
from outergrad.session.mesh.shards import (
    Shards,
    broadcast_shards,
    is_sharded,
    look_at,
)
from outergrad.session.mesh.site_ranks import PooledRanks, ShardedRanks
from outergrad.session.session import Session
from outergrad.session.settings import Settings
from outergrad.session.topology import Topology
from outergrad.session.updates import SharedChanges
from outergrad.step.buffers import Kind


class MeshTopology(Topology):
    """Topology of ranks whose gradients are pooled inside a site before they leave it.

    Args:
        mesh: the ranks.
        levels: the two transports of the mesh.
    """

    buffers: Kind = "local"

    def __init__(self, mesh: Mesh, levels: Levels) -> None:
        super().__init__(levels.site)
        for comm in (levels.site, levels.local):
            comm.board = None  # a rank that has applied its share does not know of the others
        self._mesh, self._levels = mesh, levels
        self._meeting = levels.meet(mesh.get_group("site"))
        self._shards: Shards | None = None
        self._inside: Inspection | None = None
        """With `og.LocalSteps` of a whole model: what the ranks of a site share in every backward;
        else None."""
        self._own: list[str] = []

    def look_at(
        self, model: nn.Module, method: Any, rules: Rules, *, by_sample: bool = False
    ) -> Inspection:
        """Inspects the model, or this rank's shards of it if it is sharded."""
        sharded = is_sharded(model)
        refuse(of_method(method, sharded=sharded))
        if sharded:
            steps = method if isinstance(method, LocalSteps) else None
            shared = method if steps is None else steps.method
            inspection, self._shards = look_at(model, shared, self._mesh)
            inspection = inspection if steps is None else streamed(inspection, steps)
        elif isinstance(method, LocalSteps):
            self._inside = inspect(model, Dense(), {})
            inspection = streamed(inspect(model, method.method, {}, replays=False), method)
        else:
            refuse_lacking("mesh=", {Capability.ALL_TO_ALL}, self._levels.local)
            inspection = inspect(model, method, rules, replays=False, by_sample=by_sample)
            self.buffers = Topology.buffers
        refuse(of_inspection(inspection, **self._kind))
        own = inspection.local.items()
        self._own = [f"parameter {n} of the site: {tuple(p.shape)} {p.dtype}" for n, p in own]
        return averaged_inside(model, inspection) if inspection.local else inspection

    def refuse_settings(self, **settings: Any) -> None:
        """Raises for settings that a mesh cannot have."""
        refuse(of_settings(settings, **self._kind))

    @property
    def _kind(self) -> dict[str, bool]:
        return {"sharded": self._shards is not None, "steps": self._inside is not None}

    def agree(self, lines: Sequence[str], error: Exception | None) -> int:
        """Compares descriptions over all ranks; also draws the place for failure reports."""
        levels, meeting = self._levels, self._meeting
        board = meeting.write(meeting.draw(levels.site, levels.local), levels.number)
        agreed = levels.agree(lines, error, self._own)
        meeting.look(board, levels.ranks)
        return agreed

    def make_equal(self, model: nn.Module, inspection: Inspection) -> list[Tensor]:
        """Makes parameters and buffers equal to the first site's; returns them, but no shards."""
        if self._shards is not None:
            broadcast_shards(self._levels, inspection, model)
            return []
        tensors = [t for _, _, t in shared_tensors(model, inspection)]
        self._levels.broadcast_all(tensors)
        local = {n: t for n, t in model.named_buffers() if n in inspection.local_buffers}
        with ranks_named(self._levels.local):
            broadcast_all(self._levels.local, [*inspection.local.values(), *local.values()])
        return tensors

    def session(
        self, inspection: Inspection, agreed: int, settings: Settings, method: Any
    ) -> Session:
        """Returns the session of this rank."""
        levels, transform, shards = self._levels, settings.transform, self._shards
        steps, inner = isinstance(method, LocalSteps), None
        if shards is not None:
            ranks = ShardedRanks(levels, transform, shards, inspection, changes=steps)
        else:
            ranks = PooledRanks(levels, transform)
        if not steps:
            return Session(inspection, levels.site, agreed, settings, ranks)
        if self._inside is not None:
            about = Settings(method=repr(Dense()))
            number = fingerprint([f"{agreed}, inside site {levels.site.rank}"])
            inner = Session(self._inside, levels.local, number, about)
        held = None if shards is None else shards.params
        changes = SharedChanges(inspection, method, inner, held)
        return Session(changes.inspection, levels.site, agreed, settings, ranks, changes)


def averaged_inside(model: nn.Module, inspection: Inspection) -> Inspection:
    """Adds `og.Local()` parameters to what is shared: the ranks of a site average them."""
    own = {name: p for name, p in inspection.local.items() if p.requires_grad}
    names = inspection.model.params.keys() | own.keys()
    params = {name: p for name, p in model.named_parameters() if name in names}
    reasons = {**inspection.model.reasons, **dict.fromkeys(own, "each site keeps its own")}
    return replace(
        inspection,
        model=replace(inspection.model, params=params, reasons=reasons),
        every={**inspection.every, **dict.fromkeys(own, 1)},
        watch=ModelWatch(model, params, inspection.local, lambda name: False),
    )
