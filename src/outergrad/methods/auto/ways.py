"""Ways to share the gradients of a model, and their forecasts for the present rows."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from outergrad.comm.cost import RingCost
from outergrad.core.choosing import Rows
from outergrad.core.compressor import Compressor
from outergrad.core.cost import CostModel
from outergrad.core.types import Link, Route, Slot, Unit
from outergrad.methods.common import FLOAT_BYTES

Arm = tuple[int, ...]
"""A way to share the gradients: for each group of layers, the index of its method."""
_FLOPS_PER_ROW = 6
"""Operations of compression per number of a row and per row that is sent: orthogonalising and back.
The rows of a formed gradient are its outputs."""
_PER_UNIT_S = 2e-4
"""Seconds of a unit that is not dense which do not grow with its size: its rows are captured,
planned, packed and multiplied by calls of their own."""


@dataclass(frozen=True)
class Forecast:
    """Time of some units in a step. Forecasts can be added.

    Attributes:
        link_s: Seconds in which the link is busy with their bytes.
        compute_s: Seconds in which the machine is busy with their gradients.
        delays: Number of times that a message waits for an answer.
    """

    link_s: float = 0.0
    compute_s: float = 0.0
    delays: int = 1

    def __add__(self, other: Forecast) -> Forecast:
        """Adds the seconds; the larger `delays` counts, as messages wait at the same time."""
        delays = max(self.delays, other.delays)
        return Forecast(self.link_s + other.link_s, self.compute_s + other.compute_s, delays)

    def seconds(self, link: Link, slowdown: float = 1.0) -> float:
        """Returns the total time on a link that has become `slowdown` times as slow."""
        return slowdown * (self.link_s + self.delays * link.delay_s) + self.compute_s


def route_of(unit: Unit, compressor: Compressor, rows_SK: Sequence[Sequence[int]]) -> Route:
    """Returns the route of the unit, with its layers tapped if the method wants that."""
    tapped = bool(unit.slots) and compressor.taps(unit, rows_SK)
    return compressor.route(unit, rows_SK, tapped=tapped)


@dataclass(frozen=True)
class Forecaster:
    """Makes forecasts of units: of which way to begin with and which are worth a trial.

    Attributes:
        cost: Cost model of the transport.
        link: Link of the slowest site.
        flops_per_s: Speed of the slowest machine.
    """

    cost: CostModel
    link: Link
    flops_per_s: float

    def unit(
        self, unit: Unit, compressor: Compressor, rows_SK: Sequence[Sequence[int]]
    ) -> Forecast:
        """Returns the forecast of one unit, for the rows of each site (S) and slot (K)."""
        route = route_of(unit, compressor, rows_SK)
        rows_KS = list(zip(*rows_SK, strict=True))
        own = [(slot, max(rows_S)) for slot, rows_S in zip(unit.slots, rows_KS, strict=True)]
        product = sum(2 * rows * _product_width(slot) for slot, rows in own)
        if route == Route.DENSE:
            nbytes = FLOAT_BYTES * unit.dense_numel
            return self._told(nbytes, route, product)
        tapped = bool(unit.slots) and compressor.taps(unit, rows_SK)
        parts = own if tapped else [(matrix, matrix.outputs) for matrix in unit.matrices]
        sent = [(slot, compressor.sent_rows(slot, rows, 0)) for slot, rows in parts if rows]
        nbytes = sum(compressor.payload_bytes(slot, count) for slot, count in sent)
        work = 0 if tapped else product
        for (slot, rows), (_, count) in zip([p for p in parts if p[1]], sent, strict=True):
            if slot.lookup:  # rows are summed by their ids, by the sender and the receivers
                work += 2 * (rows + self.cost.sites * count) * slot.outputs
                continue
            kept = min(count, slot.outputs, slot.inputs)  # sparse entries count as rows
            width = slot.groups * (slot.inputs + slot.outputs * tapped)
            work += _FLOPS_PER_ROW * rows * kept * width
            work += 2 * self.cost.sites * kept * slot.numel
        return self._told(nbytes, route, work)

    def _told(self, nbytes: float, route: Route, flops: float) -> Forecast:
        busy_bytes = max(self.cost.sites - 1, 1) * self.cost.share(nbytes, route)
        dense = route == Route.DENSE
        compute_s = flops / self.flops_per_s + (0.0 if dense else _PER_UNIT_S)
        delays = 1 if dense else self.cost.delays(route)
        return Forecast(busy_bytes / self.link.bytes_per_s, compute_s, delays)


def _product_width(slot: Slot) -> int:
    """Returns the numbers of a formed gradient that a row adds to; an id adds to one row of it."""
    return slot.outputs if slot.lookup else slot.numel


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

    def more_bytes(self, arm: Arm) -> float:
        """Returns the share by which a step of the way sends more bytes than dense, at least 0."""
        dense_s = self._whole((0,) * len(arm)).link_s
        return max(self._whole(arm).link_s / dense_s - 1, 0.0) if dense_s else 0.0

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
