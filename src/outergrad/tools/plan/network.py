"""Network of a plan: costs of its collectives, and rates of its lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import cast

from outergrad.comm.cost import Collective, RingCost, StarCost, adds_up, messages_of, waits_of
from outergrad.comm.trace import Started, Trace
from outergrad.core.cost import CostModel
from outergrad.core.types import Link
from outergrad.launch.errors import RecipeError
from outergrad.launch.links import ShapedLink
from outergrad.launch.traffic import HEADER_BYTES
from outergrad.tools.plan.subject import imported

GLOO_BYTES = {
    Collective.ALL_GATHER: 144,
    Collective.ALL_TO_ALL: 144,
    Collective.ALL_REDUCE: 288,
}
"""Bytes of gloo's own protocol per message and hop."""
_ASKED = ("sites", "copies", "all_reduce", "all_gather", "all_to_all", "share", "delays")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Network between the sites.

    Attributes:
        name: Name of the transport, as the user gave it.
        cost: Cost of its collectives for a site.
        own_bytes: Bytes of its own protocol in every message of a collective, where that is known.
        hub_bit_per_s: Rate of its hub's line each way, for all sites together; None for no limit,
            or no hub.
    """

    name: str
    cost: CostModel
    own_bytes: Mapping[Collective, int] = field(default_factory=dict)
    hub_bit_per_s: float | None = None

    @property
    def title(self) -> str:
        """Description for a table's title; empty for the default."""
        hub = self.hub_bit_per_s
        thin = "" if hub is None else f", hub {ShapedLink(rate_bit_per_s=hub).name}"
        return "" if self.name == "torch" else f", transport {self.name}{thin}"


def network_of(
    transport: str | Callable[[int], CostModel], sites: int, hub_bit_per_s: float | None = None
) -> Network:
    """Returns the network of a transport.

    Args:
        transport: ``torch``, ``star``, ``module:factory``, or a function that is given the number
            of sites and returns a `CostModel`.
        sites: S.
        hub_bit_per_s: Rate of the hub's line each way; None for no limit.

    Raises:
        RecipeError: There is no such transport, or it has no hub.
    """
    if transport == "torch":
        if hub_bit_per_s is not None:
            raise RecipeError("--hub-link: torch.distributed has no hub: add --transport star")
        return Network(name="torch", cost=RingCost(sites), own_bytes=GLOO_BYTES)
    if transport == "star":
        return Network(name="star", cost=StarCost(sites), hub_bit_per_s=hub_bit_per_s)
    name = transport if isinstance(transport, str) else getattr(transport, "__name__", "")
    cost = _costs(name, _factory(transport), sites)
    return Network(name=name, cost=cost, hub_bit_per_s=hub_bit_per_s)


def _factory(transport: str | Callable[[int], CostModel]) -> Callable[[int], object]:
    if not isinstance(transport, str):
        return transport
    if ":" not in transport:
        raise RecipeError(f"--transport must be torch, star or module:factory, not {transport!r}")
    return imported("--transport", transport)


def _costs(name: str, factory: Callable[[int], object], sites: int) -> CostModel:
    try:
        cost = factory(sites)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise RecipeError(f"--transport {name} raised {said}") from error
    lacking = [asked for asked in _ASKED if not hasattr(cost, asked)]
    if lacking:
        raise RecipeError(
            f"--transport {name} returned a {type(cost).__name__} without {', '.join(lacking)}: "
            f"return an outergrad.core.cost.CostModel of so many sites"
        )
    found = cast(CostModel, cost)
    if found.sites != sites:
        raise RecipeError(
            f"--transport {name} returned the costs of {found.sites} sites, not {sites}"
        )
    return found


SEGMENT_BYTES = 1448
"""Payload of one packet of TCP on Ethernet."""
PACKETS_PER_ACK = 2
LEAST_RTT_S = 3e-4
"""Round trip of gloo's threads on the shortest link, in seconds."""


def sent_wire_bytes(message: Started, network: Network) -> float:
    """Bytes that an interface sends for a collective, on average over the sites."""
    sent, received = (nbytes / network.cost.sites for nbytes in message.total)
    return _wire_bytes(sent, received, _own_bytes(message, network))


def step_seconds(trace: Trace, link: ShapedLink, network: Network) -> float:
    """Seconds of a step: its computation, and its waits for messages.

    - A site's messages queue on its link, in the order in which they are started. The site computes
      on until it needs one.
    - Each message takes a round trip besides: gloo waits until the receiver is ready, and a message
      through a hub travels to it and from it. Half a round trip is enough if the receive was posted
      a step before.
    - A ring takes a round trip per hop, in which other messages can leave.
    - A hub forwards while it receives, so a message takes the time of the busiest line.
    """
    rtt_s = max(link.rtt_s, LEAST_RTT_S)
    waited_s, free_s = 0.0, 0.0
    there_s: list[float] = []
    cost = _over(link, network.cost, trace)
    for event in trace.events:
        now_s = event.at_s + waited_s
        if isinstance(event, Started):
            transfer_s = _transfer_s(event, link, network)
            waits = _waits(event, cost)
            free_s = max(free_s, now_s + min(waits - 0.5, 0.5) * rtt_s) + transfer_s
            alone_s = now_s + waits * rtt_s + transfer_s
            there_s.append(max(alone_s, free_s + rtt_s / 2))
        else:
            waited_s += max(0.0, there_s[event.index] - now_s)
    return trace.compute_s + waited_s


def _waits(message: Started, cost: CostModel) -> float:
    """Round trips of a message, besides the time that its bytes take."""
    is_sum = message.collective == Collective.ALL_REDUCE
    straight = is_sum and adds_up(cost, message.traffic.sent)
    further = 0.5 if straight and cost.sites > 2 else 0.0  # the receives are posted ahead
    if message.is_expected and (straight or not is_sum):
        return 0.5 + further
    return 1.0 + further if straight else waits_of(cost, message.collective)


def _over(link: ShapedLink, cost: CostModel, trace: Trace) -> CostModel:
    """Cost model with the link that sites measure at their start."""
    if not isinstance(cost, RingCost):
        return cost
    started = [event for event in trace.events if isinstance(event, Started)]
    sums = [one for one in started if one.collective == Collective.ALL_REDUCE]
    summed_bytes = sum(one.traffic.sent for one in sums)
    return cost.over(Link(link.rtt_s / 2, (link.rate_bit_per_s or inf) / 8), summed_bytes)


def _transfer_s(message: Started, link: ShapedLink, network: Network) -> float:
    """Seconds on the busiest direction of this site's line or the hub's."""
    own_bytes, sites = _own_bytes(message, network), network.cost.sites
    of_site = 8 * max(_both_ways(*message.traffic, own_bytes))
    of_hub = 8 * max(_both_ways(*message.total, own_bytes * sites))
    return max(
        of_site / (link.rate_bit_per_s or inf),
        of_hub / (network.hub_bit_per_s or inf),
    )


def _both_ways(sent: float, received: float, own_bytes: float) -> tuple[float, float]:
    return _wire_bytes(sent, received, own_bytes), _wire_bytes(received, sent, own_bytes)


def _wire_bytes(sent: float, received: float, own_bytes: float) -> float:
    """Bytes with packet headers, and with acknowledgements of received packets."""
    acknowledged = (received + own_bytes) / PACKETS_PER_ACK
    sent += own_bytes
    return sent + HEADER_BYTES * (sent + acknowledged) / SEGMENT_BYTES


def _own_bytes(message: Started, network: Network) -> float:
    """Bytes of the transport's own protocol on a site's line, each way."""
    each = network.own_bytes.get(message.collective, 0)
    return each * messages_of(network.cost, message.collective)


def as_settled(link: ShapedLink, network: Network | None = None) -> Link:
    """Returns the link as `og.distribute` would measure it."""
    headers = HEADER_BYTES * (1 + 1 / PACKETS_PER_ACK) / SEGMENT_BYTES
    rate = 1e11 if link.rate_bit_per_s is None else link.rate_bit_per_s
    if network is not None and network.hub_bit_per_s is not None:
        rate = min(rate, network.hub_bit_per_s / network.cost.sites)  # all sites measure at once
    return Link(max(link.rtt_s, LEAST_RTT_S), rate / 8 / (1 + headers))
