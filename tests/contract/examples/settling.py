"""A policy of one's own: weights are shared densely at first, then each by what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import outergrad as og


@dataclass(frozen=True)
class Settling:
    """Dense while a training finds its way, and from then on at a rank that falls by stages.

    Attributes:
        dense: shared steps that are dense.
        stage: shared steps of each rank.
        ranks: of the stages; the last one stays.
    """

    dense: int = 100
    stage: int = 200
    ranks: tuple[int, ...] = (8, 4, 2)

    def candidates(self, name: str) -> Sequence[og.Dense | og.RankDAD]:
        """All methods that a parameter may ever have."""
        return [og.Dense(), *(og.RankDAD(rank=rank) for rank in self.ranks)]

    def method_of(self, name: str, step: int = 0) -> og.Dense | og.RankDAD:
        """By the number of the shared step alone, which all sites know."""
        if step < self.dense:
            return og.Dense()
        place = min((step - self.dense) // self.stage, len(self.ranks) - 1)
        return og.RankDAD(rank=self.ranks[place])
