"""Time of a step on a link, from its trace of computation and collectives."""

from __future__ import annotations

from math import inf

from outergrad.comm.cost import Collective, RingCost, adds_up, messages_of, waits_of
from outergrad.comm.trace import Started, Trace
from outergrad.core.cost import CostModel
from outergrad.core.types import Link
from outergrad.launch.links import ShapedLink
from outergrad.launch.traffic import HEADER_BYTES
from outergrad.tools.plan.network import Network

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
    for event in trace.events:
        now_s = event.at_s + waited_s
        if isinstance(event, Started):
            transfer_s = _transfer_s(event, link, network)
            waits = _waits(event, link, network)
            free_s = max(free_s, now_s + min(waits - 0.5, 0.5) * rtt_s) + transfer_s
            alone_s = now_s + waits * rtt_s + transfer_s
            there_s.append(max(alone_s, free_s + rtt_s / 2))
        else:
            waited_s += max(0.0, there_s[event.index] - now_s)
    return trace.compute_s + waited_s


def _waits(message: Started, link: ShapedLink, network: Network) -> float:
    """Round trips of a message, besides the time that its bytes take."""
    is_sum = message.collective == Collective.ALL_REDUCE
    straight = is_sum and adds_up(_over(link, network.cost), message.traffic.sent)
    if message.is_expected and (straight or not is_sum):
        return 0.5
    return 1.0 if straight else waits_of(network.cost, message.collective)


def _over(link: ShapedLink, cost: CostModel) -> CostModel:
    """Cost model with the link that sites measure at their start."""
    if not isinstance(cost, RingCost):
        return cost
    return cost.over(Link(link.rtt_s / 2, (link.rate_bit_per_s or inf) / 8))


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
