"""A session over the ranks of a mesh: sites of several ranks each."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from outergrad.core.protocols import Rules
from outergrad.session.description import shared_tensors
from outergrad.session.inspect import Inspection, inspect
from outergrad.session.mesh.levels import (
    Levels,
    Mesh,
    levels_of,
    refuse_inspection,
    refuse_method,
    refuse_settings,
)
from outergrad.session.mesh.shards import (
    ShardedSession,
    Shards,
    broadcast_shards,
    is_sharded,
    look_at,
)
from outergrad.session.mesh.two_levels import LevelsSession, TwoLevelSession
from outergrad.session.settings import Settings
from outergrad.session.topology import Topology


class MeshTopology(Topology):
    """Ranks whose gradients are pooled inside a site before they travel between sites.

    Args:
        mesh: the ranks.
        device: of the model.
        timeout: as for `distribute`.
    """

    buffers = "local"

    def __init__(self, mesh: Mesh, device: torch.device, timeout: timedelta | None) -> None:
        self._mesh = mesh
        self._levels: Levels = levels_of(mesh, device, timeout)
        self.site = self._levels.site
        self._shards: Shards | None = None

    def look_at(self, model: nn.Module, method: Any, rules: Rules) -> Inspection:
        """What is shared, of shards of the model if the ranks of a site hold such."""
        refuse_method(method)
        if is_sharded(model):
            inspection, self._shards = look_at(model, method, self._mesh)
        else:
            inspection = inspect(model, method, rules)
        refuse_inspection(inspection)
        return inspection

    def refuse_settings(self, **settings: Any) -> None:
        """Raises for settings that need one level."""
        refuse_settings(**settings)

    def agree(self, lines: Sequence[str], error: Exception | None) -> int:
        """All ranks of all sites."""
        return self._levels.agree(lines, error)

    def make_equal(self, model: nn.Module, inspection: Inspection) -> list[Tensor]:
        """Overwrites parameters and buffers by the first site's; shards are not compared."""
        if self._shards is not None:
            broadcast_shards(self._levels, inspection, model)
            return []
        tensors = [t for _, _, t in shared_tensors(model, inspection)]
        self._levels.broadcast_all(tensors)
        return tensors

    def session(
        self, inspection: Inspection, agreed: int, settings: Settings, method: Any
    ) -> LevelsSession:
        """The session of this rank."""
        if self._shards is not None:
            return ShardedSession(inspection, self._levels, agreed, settings, self._shards)
        return TwoLevelSession(inspection, self._levels, agreed, settings)
