"""Ways to share the gradients of a model, and their forecasts for the present rows."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from outergrad.comm.cost import RingCost
from outergrad.core.choosing import Rows
from outergrad.core.compressor import Compressor
from outergrad.core.cost import CostModel
from outergrad.core.types import Link, Route, Unit
from outergrad.methods.auto.forecast import Forecast, Forecaster, route_of
from outergrad.methods.auto.knowledge import Arm

_FASTEST_LINK = 1 / 64
"""Smallest slowdown of the link: it is taken to be at most 64 times as fast as measured."""


class Ways:
    """Distinct ways, and a forecast of the time of each.

    Args:
        groups: Groups of units that get one method each.
        compressors: Compressors of the methods.
    """

    def __init__(self, groups: Sequence[Sequence[Unit]], compressors: Sequence[Compressor]) -> None:
        self._groups, self._compressors = groups, compressors
        self._forecaster = Forecaster(RingCost(1), Link(0.0, math.inf), math.inf)
        self._rows: Rows | None = None
        self._options: list[dict[int, Forecast]] = []
        """Forecasts by method for each group; of methods that send it alike, only the first."""
        self._same_as: list[tuple[int, ...]] = []
        self.slowdown = 1.0
        """Estimate of how many times as slow as measured the link is."""

    def settle(self, cost: CostModel, link: Link, flops_per_s: float) -> None:
        """Stores the cost model, the measured link and the measured speed of the machine."""
        self._forecaster = Forecaster(cost, link, flops_per_s)

    def look_at(self, rows: Rows) -> None:
        """Computes the distinct ways and their forecasts for the rows of all sites."""
        if rows == self._rows:
            return
        pairs = [(group, self._same(group, rows)) for group in self._groups]
        self._rows, self._same_as = rows, [same for _, same in pairs]
        self._options = [
            {k: self._forecast(group, k, rows) for k in sorted(set(same))} for group, same in pairs
        ]

    def _same(self, group: Sequence[Unit], rows: Rows) -> tuple[int, ...]:
        """Returns for each method the first one that sends the group in the same way."""
        first: dict[Hashable, int] = {}
        ways = [self._way(k, group, rows) for k in range(len(self._compressors))]
        return tuple(first.setdefault(way, k) for k, way in enumerate(ways))

    def _way(self, k: int, group: Sequence[Unit], rows: Rows) -> Hashable:
        routes = {route_of(unit, self._compressors[k], rows[unit]) for unit in group}
        return Route.DENSE if routes <= {Route.DENSE} else k

    def _forecast(self, group: Sequence[Unit], k: int, rows: Rows) -> Forecast:
        of = self._forecaster.unit
        each = (of(unit, self._compressors[k], rows[unit]) for unit in group)
        return sum(each, Forecast())

    def plain(self, arm: Arm) -> Arm:
        """Returns the way with each method replaced by the first one that sends the group alike."""
        return tuple(same[k] for same, k in zip(self._same_as, arm, strict=True))

    @property
    def whole(self) -> Sequence[Arm]:
        """Distinct ways with one method for all layers."""
        ways = ((k,) * len(self._groups) for k in range(len(self._compressors)))
        return list(dict.fromkeys(map(self.plain, ways)))

    def near(self, arm: Arm) -> list[Arm]:
        """Returns the other ways with one method for all layers, or with one group changed."""
        options = enumerate(self._options)
        single = [(*arm[:g], k, *arm[g + 1 :]) for g, option in options for k in option]
        found = dict.fromkeys([*self.whole, *map(self.plain, single)])
        found.pop(self.plain(arm), None)
        return list(found)

    def seconds(self, arm: Arm) -> float:
        """Returns the forecast of the time that a step's gradients take."""
        return self._whole(arm).seconds(self._forecaster.link, self.slowdown)

    def _whole(self, arm: Arm) -> Forecast:
        pairs = zip(self._options, self.plain(arm), strict=True)
        return sum((option[k] for option, k in pairs), Forecast())

    def best(self) -> Arm:
        """Returns the way of best forecast: one method for all layers, or the best per group."""
        link, slowdown = self._forecaster.link, self.slowdown
        each = tuple(
            min(option, key=lambda k: option[k].seconds(link, slowdown)) for option in self._options
        )
        return min([each, *self.near(each)], key=self.seconds)

    def blame_link(self, arm: Arm, more_s: float) -> None:
        """Sets the slowdown as if the link alone had made steps of the way `more_s` longer."""
        whole = self._whole(arm)
        once_s = whole.seconds(self._forecaster.link) - whole.compute_s
        self.slowdown = max(self.slowdown + more_s / max(once_s, 1e-9), _FASTEST_LINK)
