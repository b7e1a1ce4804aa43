"""From what a step computes and exchanges to its time on a link."""

from __future__ import annotations

from math import inf

from outergrad.comm.cost import Pattern
from outergrad.comm.trace import Started, Trace
from outergrad.core.types import Link
from outergrad.launch.links import ShapedLink
from outergrad.launch.traffic import HEADER_BYTES

SEGMENT_BYTES = 1448
"""Payload of one packet of TCP on Ethernet."""
PACKETS_PER_ACK = 2
MESSAGE_BYTES = {Pattern.PAIRS: 144, Pattern.RING: 288}
"""What gloo says besides, per message and hop."""
LEAST_RTT_S = 3e-4
"""What gloo's threads take to hear of each other on the shortest link."""


def wire_bytes(payload_bytes: float, pattern: Pattern, sites: int) -> float:
    """Bytes on an interface: with headers of packets, and acknowledgements of as much received."""
    nbytes = payload_bytes + MESSAGE_BYTES[pattern] * pattern.messages(sites)
    return nbytes + HEADER_BYTES * nbytes / SEGMENT_BYTES * (1 + 1 / PACKETS_PER_ACK)


def step_seconds(trace: Trace, link: ShapedLink, sites: int) -> float:
    """Seconds of a step: what it computes, and what it waits for messages.

    A site's messages take their turns on its link, in the order in which they are started, while
    it goes on computing until it needs one. Gloo sends when it has heard that the other side is
    ready: a message takes a round trip besides, and a ring one per hop, in which what else is under
    way can leave.
    """
    rtt_s, rate_bit_per_s = max(link.rtt_s, LEAST_RTT_S), link.rate_bit_per_s or inf
    waited_s, free_s = 0.0, 0.0
    there_s: list[float] = []
    for event in trace.events:
        now_s = event.at_s + waited_s
        if isinstance(event, Started):
            transfer_s = 8 * wire_bytes(event.busy_bytes, event.pattern, sites) / rate_bit_per_s
            free_s = max(free_s, now_s + rtt_s / 2) + transfer_s
            round_trips = 1 if event.pattern == Pattern.PAIRS else event.pattern.messages(sites)
            alone_s = now_s + round_trips * rtt_s + transfer_s
            there_s.append(max(alone_s, free_s + rtt_s / 2))
        else:
            waited_s += max(0.0, there_s[event.index] - now_s)
    return trace.compute_s + waited_s


def as_settled(link: ShapedLink) -> Link:
    """What `og.distribute` would measure of it."""
    headers = HEADER_BYTES * (1 + 1 / PACKETS_PER_ACK) / SEGMENT_BYTES
    rate = 1e11 if link.rate_bit_per_s is None else link.rate_bit_per_s
    return Link(max(link.rtt_s, LEAST_RTT_S), rate / 8 / (1 + headers))
