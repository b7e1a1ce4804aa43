"""What a collective costs a site: the one place that knows how bytes and delays grow with sites."""

from __future__ import annotations

from enum import Enum

from outergrad.core.types import Link, Route


class Pattern(Enum):
    """Who a message goes to."""

    PAIRS = "pairs"
    """From every site straight to every other."""
    RING = "ring"
    """Round the sites, added up on the way."""

    def messages(self, sites: int) -> int:
        """That a site sends in a collective: to every other, or twice round the ring."""
        return sites - 1 if self == Pattern.PAIRS else 2 * (sites - 1)


def ring_bytes(nbytes: int, sites: int) -> int:
    """Bytes that one site sends in a ring all-reduce."""
    return Pattern.RING.messages(sites) * nbytes // sites


def ring_share(nbytes: float, sites: int) -> float:
    """The same per other site: as an all-gather sends all of what it gathers to each."""
    return 2 * nbytes / sites


def seconds(way: Route, sent_bytes: float, sites: int, link: Link) -> float:
    """Of the low-rank messages of a step.

    Args:
        way: how they travel: two all-reduces wait for each message of two rings.
        sent_bytes: what the busiest site sends to all others together.
        sites: S.
        link: what the slowest site has.
    """
    rings = 2 * Pattern.RING.messages(sites)
    delays = {Route.GATHER: 1, Route.TWO_WAY: 2, Route.REDUCE: rings}[way]
    return delays * link.delay_s + sent_bytes / link.bytes_per_s
