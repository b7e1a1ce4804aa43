"""Planner of the steps of one rank's share of a model."""

from __future__ import annotations

from collections.abc import Sequence, Set

from outergrad.core.cost import CostModel
from outergrad.core.model import Compressors, Model, part_of
from outergrad.core.reasons import Reason
from outergrad.core.types import Unit
from outergrad.planning.plan import Planner


class SharePlanner(Planner):
    """Planner of one rank's share: its methods commit residuals when the step of all shares counts.

    Args:
        shares: per rank of the site, the part of the model that it pools.
        rank: local rank of this one.
        compressors: of all units.
        cost: of the transport between the sites.
        own: names of parameters that stay inside the site.

    Attributes:
        between: the part of this rank's share that it takes to the other sites.
        known: per unit, how it travelled, as all ranks of the site know.
    """

    def __init__(
        self,
        shares: Sequence[Model],
        rank: int,
        compressors: Compressors,
        cost: CostModel,
        own: Set[str] = frozenset(),
    ) -> None:
        self.between = part_of(shares[rank], shares[rank].params.keys() - own)
        super().__init__(self.between, compressors, cost)
        self._units = frozenset(unit for share in shares for unit in share.units)
        self.shares, self._rank, self._own = shares, rank, own
        self.known: dict[Unit, Reason] = {}
        self._committed = True

    @property
    def share(self) -> Model:
        """Share of this rank."""
        return self.shares[self._rank]

    def of(self, model: Model) -> SharePlanner:
        """Returns the planner of a part of the model, which shares what this one has learnt."""
        parts = [part_of(share, model.params) for share in self.shares]
        part = SharePlanner(parts, self._rank, self._compressors, self._cost, self._own)
        part._has_autograd_grad = self._has_autograd_grad
        return part

    def commit(self, *, applied: bool) -> None:
        """Rolls back at once if the share is void; else waits for `conclude`."""
        self._committed = not applied
        if not applied:
            super().commit(applied=False)

    def conclude(self, *, applied: bool) -> None:
        """Commits or rolls back a share that has arrived, by whether all shares did."""
        if not self._committed:
            self._committed = True
            super().commit(applied=applied)
