"""How low rank should travel: the time that each way would take over a link."""

from __future__ import annotations

import math
from collections.abc import Mapping

from outergrad.core.types import Link, Route

_ENOUGH = 1.1
"""A way that takes at most so many times as long as the fastest is as good, if its error is less:
measured links and estimates are no more exact."""

WAYS = (Route.GATHER, Route.TWO_WAY, Route.REDUCE)
"""By their error: gathered triplets bring rank S R, merged ones the best R of these; sketches
follow the mean gradient from step to step."""


def delays(way: Route, sites: int) -> int:
    """Messages that wait for one another: two all-reduces in a ring are 4 (S - 1)."""
    return {Route.GATHER: 1, Route.TWO_WAY: 2, Route.REDUCE: 4 * (sites - 1)}[way]


def times(sent_bytes: Mapping[Route, float], sites: int, link: Link) -> dict[Route, float]:
    """Seconds for the low-rank messages of a step.

    Args:
        sent_bytes: what the busiest site sends to all others together, by way.
        sites: S.
        link: what the slowest site has.
    """
    return {
        way: delays(way, sites) * link.delay_s + nbytes / link.bytes_per_s
        for way, nbytes in sent_bytes.items()
    }


def best_way(seconds: Mapping[Route, float]) -> Route:
    """The fastest; of those that are about as fast, the one with the smallest error."""
    limit = _ENOUGH * min(seconds.values())
    return next(way for way in WAYS if seconds.get(way, math.inf) <= limit)


def explained(seconds: Mapping[Route, float], link: Link) -> str:
    """The choice in words, for the coverage table."""
    way = best_way(seconds)
    others = ", ".join(f"{w.value} {1e3 * s:.3g}" for w, s in seconds.items() if w != way)
    measured = f"{1e3 * link.delay_s:.3g} ms, {8e-6 * link.bytes_per_s:.3g} Mbit/s"
    return f'reduce="auto": {way.value} {1e3 * seconds[way]:.3g} ms, {others} at {measured}'
