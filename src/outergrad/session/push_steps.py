"""Steps of `og.Gossip` over a directed graph: push-sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outergrad.core.sites import Site
from outergrad.core.transport import Comm
from outergrad.core.types import StateDict
from outergrad.session.core import Core
from outergrad.session.elastic import Elastic
from outergrad.session.failure import FailureHandler
from outergrad.session.gossip_steps import SharedWithNeighbours
from outergrad.session.loop import BackwardLoop
from outergrad.session.push_rounds import PushRounds


class SharedByPushing(SharedWithNeighbours):
    """Weights are averaged by pushes along directed edges: `og.Gossip` with a directed graph.

    All is as between neighbours that exchange both ways, but the rounds.
    """

    def attach(
        self, core: Core, failure: FailureHandler, elastic: Elastic, loop: BackwardLoop
    ) -> None:
        """Opens lines to the neighbours, and listens to the user's optimizers."""
        super().attach(core, failure, elastic, loop)
        self._pushes = PushRounds(self._method, self._params, core.at.comm, core.at.number)

    def _both_ways(self, comm: Comm) -> list[int]:
        return []

    def _round(self, step: int, *, whole: bool = False) -> tuple[set[Site], set[Site], float]:
        return self._pushes.round(step, whole=whole)

    def _scalars(self) -> dict[str, float]:
        return {"push_mass": self._pushes.sum.mass}

    def settle(self, cold: Sequence[int] = ()) -> list[Site]:
        """Takes all that neighbours have given before now; called on all sites.

        Returns:
            Neighbours that have not settled in time.
        """
        return self._pushes.settle()

    def _summands(self) -> list[Tensor]:
        return self._pushes.sum.summands()

    @torch.no_grad()
    def _take_mean(self, sums: Sequence[Tensor]) -> None:
        self._pushes.sum.begin_at_mean(sums)

    @property
    def _receivers(self) -> list[Site]:
        return self._pushes.receivers

    def _why_away(self, site: Site) -> str:
        return self._pushes.why_away(site)

    def state(self) -> StateDict:
        """Returns this site's part of the sum."""
        found = super().state()
        found["gossip"]["sum"] = self._pushes.sum.state()
        return found

    def _resume(self, found: StateDict) -> None:
        self._pushes.load(found["sum"])

    def release(self) -> None:
        """Lets go of the model."""
        super().release()
        self._pushes.close()
