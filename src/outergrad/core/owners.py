"""Who merges what: shares of about the same size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def owners(sizes: Mapping[T, float], sites: int) -> dict[T, int]:
    """A site for each item, the largest first, always the one that has least so far.

    At most a third above the best division (Graham, Bounds on Multiprocessing Timing Anomalies,
    1969); the same on all sites, as it depends on the sizes and their order alone.
    """
    loads, owner = [0.0] * sites, {}
    for item in sorted(sizes, key=lambda item: -sizes[item]):
        site = loads.index(min(loads))
        owner[item] = site
        loads[site] += sizes[item]
    return owner


def heaviest_share(sizes: Mapping[T, float], sites: int) -> float:
    """The sum of the sizes that the busiest site owns."""
    loads = [0.0] * sites
    for item, site in owners(sizes, sites).items():
        loads[site] += sizes[item]
    return max(loads)
