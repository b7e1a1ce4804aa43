"""Forecasts of a unit's time by a method: from counts, the measured link and machine.

They decide which way to begin with and which are worth a trial; trials decide the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outergrad.core.compressor import Compressor
from outergrad.core.cost import CostModel
from outergrad.core.types import Link, Route, Slot, Unit
from outergrad.methods.common import FLOAT_BYTES

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
    """Makes forecasts of units.

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
