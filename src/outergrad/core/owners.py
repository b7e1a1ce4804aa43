"""Balanced assignment of items to sites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def owners(sizes: Mapping[T, float], sites: int) -> dict[T, int]:
    """Assigns each item a site: largest item first, always to the site with the least load.

    At most a third above the best division (Graham, Bounds on Multiprocessing Timing Anomalies,
    1969). All sites get the same result, since it depends only on the sizes and their order.
    """
    loads, owner = [0.0] * sites, {}
    for item in sorted(sizes, key=lambda item: -sizes[item]):
        site = loads.index(min(loads))
        owner[item] = site
        loads[site] += sizes[item]
    return owner


def heaviest_share(sizes: Mapping[T, float], sites: int) -> float:
    """Total size of the items of the most loaded site."""
    loads = [0.0] * sites
    for item, site in owners(sizes, sites).items():
        loads[site] += sizes[item]
    return max(loads)
