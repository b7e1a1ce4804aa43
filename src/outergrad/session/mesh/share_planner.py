"""The plans of one rank's share of a model."""

from __future__ import annotations

from collections.abc import Sequence, Set

from outergrad.core.cost import CostModel
from outergrad.core.model import Compressors, Model, part_of
from outergrad.core.reasons import Reason
from outergrad.core.types import Unit
from outergrad.planning.plan import Planner


class SharePlanner(Planner):
    """Of one rank's share: what methods remember counts when the step of all shares does.

    Args:
        shares: what each rank pools of what its site has.
        rank: of this one in its site.
        compressors: of all units.
        cost: of the transport between the sites.
        own: names of parameters that stay inside the site.

    Attributes:
        between: of this rank's share, what it takes to the other sites.
        known: how units travelled, as all ranks of the site know it.
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
        """This rank's."""
        return self.shares[self._rank]

    def of(self, model: Model) -> SharePlanner:
        """Of the shares of a part of the model."""
        parts = [part_of(share, model.params) for share in self.shares]
        part = SharePlanner(parts, self._rank, self._compressors, self._cost, self._own)
        part._has_autograd_grad = self._has_autograd_grad
        return part

    def commit(self, *, applied: bool) -> None:
        """The share has arrived, or is void."""
        self._committed = not applied
        if not applied:
            super().commit(applied=False)

    def conclude(self, *, applied: bool) -> None:
        """So have the others, or not."""
        if not self._committed:
            self._committed = True
            super().commit(applied=applied)
