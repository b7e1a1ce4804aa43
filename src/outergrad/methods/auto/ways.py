"""Which ways there are to share the gradients of a model, for the rows of now."""

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
"""How much faster than measured the link may come to look."""


class Ways:
    """The ways that differ, and how long each is likely to take.

    Args:
        groups: of units that have one method.
        compressors: of the methods.
    """

    def __init__(self, groups: Sequence[Sequence[Unit]], compressors: Sequence[Compressor]) -> None:
        self._groups, self._compressors = groups, compressors
        self._forecaster = Forecaster(RingCost(1), Link(0.0, math.inf), math.inf)
        self._rows: Rows | None = None
        self._options: list[dict[int, Forecast]] = []
        """Per group the methods by which it travels differently; of those alike, the first."""
        self._same_as: list[tuple[int, ...]] = []
        self.slowdown = 1.0
        """How many times as slow as it was measured the link seems to be."""

    def settle(self, cost: CostModel, link: Link, flops_per_s: float) -> None:
        """Takes note of what was measured."""
        self._forecaster = Forecaster(cost, link, flops_per_s)

    def look_at(self, rows: Rows) -> None:
        """What there is for the rows of all sites."""
        if rows == self._rows:
            return
        pairs = [(group, self._same(group, rows)) for group in self._groups]
        self._rows, self._same_as = rows, [same for _, same in pairs]
        self._options = [
            {k: self._forecast(group, k, rows) for k in sorted(set(same))} for group, same in pairs
        ]

    def _same(self, group: Sequence[Unit], rows: Rows) -> tuple[int, ...]:
        """Per method, the first by which the group travels as by this one."""
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
        """The way that is told of as the same."""
        return tuple(same[k] for same, k in zip(self._same_as, arm, strict=True))

    @property
    def whole(self) -> Sequence[Arm]:
        """The ways with one method for all layers."""
        ways = ((k,) * len(self._groups) for k in range(len(self._compressors)))
        return list(dict.fromkeys(map(self.plain, ways)))

    def near(self, arm: Arm) -> list[Arm]:
        """Ways with one method for all layers, and those that differ in one group alone."""
        options = enumerate(self._options)
        single = [(*arm[:g], k, *arm[g + 1 :]) for g, option in options for k in option]
        found = dict.fromkeys([*self.whole, *map(self.plain, single)])
        found.pop(self.plain(arm), None)
        return list(found)

    def seconds(self, arm: Arm) -> float:
        """The forecast of a step's gradients."""
        return self._whole(arm).seconds(self._forecaster.link, self.slowdown)

    def _whole(self, arm: Arm) -> Forecast:
        pairs = zip(self._options, self.plain(arm), strict=True)
        return sum((option[k] for option, k in pairs), Forecast())

    def best(self) -> Arm:
        """By the forecast: one method for all layers, or for each group its best."""
        link, slowdown = self._forecaster.link, self.slowdown
        each = tuple(
            min(option, key=lambda k: option[k].seconds(link, slowdown)) for option in self._options
        )
        return min([each, *self.near(each)], key=self.seconds)

    def blame_link(self, arm: Arm, more_s: float) -> None:
        """Steps of a way take so much longer: the link may be as slow as that, but not slower."""
        whole = self._whole(arm)
        once_s = whole.seconds(self._forecaster.link) - whole.compute_s
        self.slowdown = max(self.slowdown + more_s / max(once_s, 1e-9), _FASTEST_LINK)
