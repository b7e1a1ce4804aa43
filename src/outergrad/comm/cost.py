"""What a collective costs a site: the one place that knows how bytes and delays grow with sites."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from outergrad.core.compressor import Setup
from outergrad.core.cost import CostModel, Traffic
from outergrad.core.types import Link, Route


class Collective(Enum):
    """What a site takes part in with all others."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"


ADDED_BYTES = 1 << 17
"""Of what two sites add up on any link: for more a ring takes less of the processor."""
_ADDED_S = 4.5e-10
"""What each byte takes longer than in a ring, where nothing waits for the link (docs/design.md)."""
_FAR_S = 2e-3
"""Delay from which on that is weighed: less may be a processor that was busy."""


@dataclass(frozen=True)
class RingCost:
    """Sums go round a ring, everything else from every site straight to every other.

    Attributes:
        sites: S.
        added_bytes: the longest sum for which two sites send each other all of it instead.
    """

    sites: int
    added_bytes: float = ADDED_BYTES

    def over(self, link: Link) -> RingCost:
        """The same, over a link that is known.

        A ring waits for the link once more than two sites that send each other all, and again at
        each part of a long sum; it takes less of the processor. A link that is slow and near makes
        no difference: both take as many bytes.
        """
        far_bytes = link.delay_s / _ADDED_S if link.delay_s > _FAR_S else 0.0
        return replace(self, added_bytes=max(ADDED_BYTES, far_bytes))

    @property
    def copies(self) -> int:
        """One for each other site."""
        return self.sites - 1

    def all_reduce(self, nbytes: int) -> Traffic:
        """2 (S - 1) / S of the tensor, both ways."""
        return _in_a_ring(self.sites, nbytes)

    def all_gather(self, own: int, others: int) -> Traffic:
        """This site's to each other one."""
        return Traffic(self.copies * own, others)

    def all_to_all(self, own: int, others: int) -> Traffic:
        """Straight to each."""
        return Traffic(own, others)

    def share(self, nbytes: float, way: Route) -> float:
        """Sums and two ways send 2 (S - 1) / S, gathered bytes S - 1."""
        return nbytes if way == Route.GATHER else 2 * nbytes / self.sites

    def delays(self, way: Route) -> int:
        """Two all-reduces wait for each message of two rings."""
        return {Route.GATHER: 1, Route.TWO_WAY: 2, Route.REDUCE: 4 * (self.sites - 1)}[way]


@lru_cache(maxsize=1024)
def _in_a_ring(sites: int, nbytes: int) -> Traffic:
    part = 2 * (sites - 1) * nbytes // sites
    return Traffic(part, part)


@dataclass(frozen=True)
class StarCost:
    """Every payload goes to a hub, which is no site, and from there to whom it is for.

    A site sends its own once, and receives those of the S - 1 others, or their sum.

    Attributes:
        sites: S.
    """

    sites: int

    @property
    def copies(self) -> int:
        """One, to the hub."""
        return 1

    def all_reduce(self, nbytes: int) -> Traffic:
        """The tensor to the hub, and the sum back; a single site needs none."""
        part = nbytes if self.sites > 1 else 0
        return Traffic(part, part)

    def all_gather(self, own: int, others: int) -> Traffic:
        """This site's once; a single site's to nobody."""
        return Traffic(own if self.sites > 1 else 0, others)

    def all_to_all(self, own: int, others: int) -> Traffic:
        """Through the hub, to each."""
        return Traffic(own, others)

    def share(self, nbytes: float, way: Route) -> float:
        """By what a site receives: S - 1 times what is gathered, but a sum once.

        In two ways it gets 1 / S of every other site's, then the merged ones of all other sites.
        """
        if way == Route.GATHER:
            return nbytes
        return 2 * nbytes / self.sites if way == Route.TWO_WAY else nbytes / max(self.sites - 1, 1)

    def delays(self, way: Route) -> int:
        """As many as there are rounds: to the hub and back takes an all-gather as long."""
        return {Route.GATHER: 1, Route.TWO_WAY: 2, Route.REDUCE: 2}[way]


@dataclass(frozen=True)
class BlindStarCost(StarCost):
    """Through a hub that must not read what it relays, and so cannot add up.

    What would be summed is gathered, and every site adds up itself.
    """

    def all_reduce(self, nbytes: int) -> Traffic:
        """As an all-gather of the same."""
        return self.all_gather(nbytes, (self.sites - 1) * nbytes)

    def share(self, nbytes: float, way: Route) -> float:
        """Sums are gathered."""
        return nbytes if way == Route.REDUCE else super().share(nbytes, way)


def adds_up(cost: CostModel, nbytes: int) -> bool:
    """Whether two sites of a process group send each other all of a sum, in one round."""
    return isinstance(cost, RingCost) and cost.sites == 2 and 0 < nbytes <= cost.added_bytes


def cost_of(compressor: Setup, sites: int) -> CostModel:
    """What a method goes by: until it is attached, what torch.distributed costs."""
    return compressor.cost or RingCost(sites)


def waits_of(cost: CostModel, collective: Collective) -> float:
    """How many times one collective waits for as long as an all-gather of few bytes."""
    if collective == Collective.ALL_REDUCE:
        return cost.delays(Route.REDUCE) / 2  # sketches take two
    gathered = cost.delays(Route.GATHER)
    if collective == Collective.ALL_GATHER:
        return gathered
    return cost.delays(Route.TWO_WAY) - gathered  # what is merged is gathered


def messages_of(cost: CostModel, collective: Collective) -> float:
    """That a site sends in one collective: a sum has one at each hop."""
    sums = collective == Collective.ALL_REDUCE
    return waits_of(cost, collective) if sums else cost.copies


def seconds(cost: CostModel, way: Route, busy_bytes: float, link: Link) -> float:
    """Of the low-rank messages of a step.

    Args:
        cost: of the transport.
        way: how they travel.
        busy_bytes: what the busiest site sends to all others together, or receives of them.
        link: what the slowest site has.
    """
    return cost.delays(way) * link.delay_s + busy_bytes / link.bytes_per_s
