"""Cost models of collectives: how bytes and delays grow with the number of sites."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from outergrad.core.compressor import Compressor
from outergrad.core.cost import CostModel, Traffic
from outergrad.core.types import Link, Route


class Collective(Enum):
    """The kinds of collectives."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"


ADDED_BYTES = 1 << 17
"""Largest sum, bytes, that sites add up themselves on any link: a ring costs less CPU."""
_ADDED_S, _PIECES_S = 4.5e-10, 1e-9
"""Extra seconds per byte over a ring, of two and of more sites, where nothing waits for the link
(docs/design.md)."""
_IDLE_SHARE = 0.15
"""Share of the time of a sum's bytes by which more sites leave the link idle between two rounds."""
_FAR_S = 2e-3
"""Delay, seconds, from which on a link counts as far: less may be a busy CPU."""

_WORTH_BYTES = 1 << 17
"""Bytes, fewer at the busiest site, that are worth one more delay: 10 ms at 100 Mbit/s."""


@dataclass(frozen=True)
class RingCost:
    """Costs of a process group: sums take the bytes of a ring, all goes directly from site to site.

    Sites add up a sum themselves, or leave it to the backend's ring. Two send each other all of it.
    More send each other pieces, first as they are to the site that adds them up, then the sums.

    Attributes:
        sites: S.
        added_bytes: largest sum, bytes, that sites add up themselves, without a ring.
    """

    sites: int
    added_bytes: float = ADDED_BYTES

    def over(self, link: Link, summed_bytes: float = 0.0) -> RingCost:
        """Returns the costs over a link that was measured.

        A ring waits for the link 2 (S - 1) times, and again at each part of a long sum, where sites
        that add up themselves wait once (two sites) or twice. But it takes less CPU, and its parts
        keep the link busy. A slow link with a small delay makes no difference: both ways take the
        same bytes. Among more than two sites a ring loses much beside a sum in pieces. So where all
        sums of a step are too long together, all but the shortest go in a ring.

        Args:
            link: of the slowest site.
            summed_bytes: most bytes that a step may sum.
        """
        far_bytes = self._far_bytes(link) if link.delay_s > _FAR_S else 0.0
        if self.sites > 2 and summed_bytes > far_bytes:
            far_bytes = 0.0
        return replace(self, added_bytes=max(ADDED_BYTES, far_bytes))

    def _far_bytes(self, link: Link) -> float:
        """Bytes from which on what a ring costs less is more than its delays."""
        if self.sites <= 2:
            return link.delay_s / _ADDED_S
        per_byte_s = 2 * self.copies / self.sites / link.bytes_per_s
        return 2 * (self.sites - 2) * link.delay_s / (_PIECES_S + _IDLE_SHARE * per_byte_s)

    @property
    def copies(self) -> int:
        """S - 1: one for each other site."""
        return self.sites - 1

    def all_reduce(self, nbytes: int) -> Traffic:
        """Returns 2 (S - 1) / S of the tensor, sent and received."""
        return _in_a_ring(self.sites, nbytes)

    def all_gather(self, own: int, others: int) -> Traffic:
        """Returns own bytes once for each other site, and the bytes of the others."""
        return Traffic(self.copies * own, others)

    def all_to_all(self, own: int, others: int) -> Traffic:
        """Returns the bytes as they are: each tensor goes directly to its site."""
        return Traffic(own, others)

    def share(self, nbytes: float, way: Route) -> float:
        """Returns the gathered bytes that keep a link as busy as `nbytes` sent this way.

        Sums and two-way send 2 (S - 1) / S of their bytes, a gather S - 1 times its own.
        """
        return nbytes if way == Route.GATHER else 2 * nbytes / self.sites

    def delays(self, way: Route) -> int:
        """Number of delays; low-rank sketches take two all-reduces, of two rounds each.

        Sums that are left to a ring (`over`) take more: 2 (S - 1) each, which is not counted.
        """
        return {Route.GATHER: 1, Route.TWO_WAY: 2, Route.REDUCE: 4 * (self.sites > 1)}[way]


@lru_cache(maxsize=1024)
def _in_a_ring(sites: int, nbytes: int) -> Traffic:
    part = 2 * (sites - 1) * nbytes // sites
    return Traffic(part, part)


@dataclass(frozen=True)
class StarCost:
    """Costs of a hub, which is no site, and relays every payload to its recipients.

    A site sends its payload once, and receives those of the S - 1 others, or their sum.

    Attributes:
        sites: S.
    """

    sites: int

    @property
    def copies(self) -> int:
        """One, to the hub."""
        return 1

    def all_reduce(self, nbytes: int) -> Traffic:
        """Returns the bytes of the tensor and of its sum; 0 for a single site."""
        part = nbytes if self.sites > 1 else 0
        return Traffic(part, part)

    def all_gather(self, own: int, others: int) -> Traffic:
        """Returns own bytes once (a single site sends none), and the bytes of the others."""
        return Traffic(own if self.sites > 1 else 0, others)

    def all_to_all(self, own: int, others: int) -> Traffic:
        """Returns the bytes as they are: the hub relays each tensor to its site."""
        return Traffic(own, others)

    def share(self, nbytes: float, way: Route) -> float:
        """Returns the gathered bytes that keep a link as busy as `nbytes` sent this way.

        What a site receives counts: S - 1 times a gathered payload, but a sum once. Two-way it
        receives 1 / S of every other site's payload, and then the merged parts of all other sites.
        """
        if way == Route.GATHER:
            return nbytes
        return 2 * nbytes / self.sites if way == Route.TWO_WAY else nbytes / max(self.sites - 1, 1)

    def delays(self, way: Route) -> int:
        """Number of rounds to the hub and back, each as long as an all-gather."""
        return {Route.GATHER: 1, Route.TWO_WAY: 2, Route.REDUCE: 2}[way]


def adds_up(cost: CostModel, nbytes: int) -> bool:
    """True if sites of a process group add up a sum themselves: two in one round, more in two."""
    return isinstance(cost, RingCost) and cost.sites > 1 and 0 < nbytes <= cost.added_bytes


def relays(cost: CostModel, largest: float, whole: float) -> bool:
    """True if gathered messages go round in pieces, as the largest would cost its sender too much.

    It would send S - 1 times `largest`. In pieces it sends it once, and all sites pass on what they
    got, about once `whole`. That takes one more delay, so it must save half, and enough bytes.

    Args:
        cost: cost model of the transport. A hub gets every message once anyway.
        largest: bytes of the largest message.
        whole: bytes of the messages of all sites together.
    """
    if not isinstance(cost, RingCost):
        return False
    direct, passed_on = cost.copies * largest, largest + whole
    return direct > 2 * passed_on and direct - passed_on > _WORTH_BYTES


def cost_of(compressor: Compressor, sites: int) -> CostModel:
    """Returns the cost model of a method: until it is attached, that of torch.distributed."""
    return compressor.cost or RingCost(sites)


def waits_of(cost: CostModel, collective: Collective) -> float:
    """Returns the delay of one collective, in delays of an all-gather of few bytes.

    An all-reduce of a process group counts as a ring, of 2 (S - 1) hops.
    """
    if collective == Collective.ALL_REDUCE:
        return 2.0 * cost.copies if isinstance(cost, RingCost) else cost.delays(Route.REDUCE) / 2
    gathered = cost.delays(Route.GATHER)
    if collective == Collective.ALL_GATHER:
        return gathered
    return cost.delays(Route.TWO_WAY) - gathered  # what is merged is gathered


def messages_of(cost: CostModel, collective: Collective) -> float:
    """Returns how many messages a site sends in one collective: a sum takes one per hop."""
    sums = collective == Collective.ALL_REDUCE
    return waits_of(cost, collective) if sums else cost.copies


def seconds(cost: CostModel, way: Route, busy_bytes: float, link: Link) -> float:
    """Returns the seconds that the low-rank messages of a step take.

    Args:
        cost: cost model of the transport.
        way: route of the messages.
        busy_bytes: bytes that the busiest site sends to all others, or receives from them.
        link: of the slowest site.
    """
    return cost.delays(way) * link.delay_s + busy_bytes / link.bytes_per_s
