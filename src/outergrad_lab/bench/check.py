"""Comparison of the bytes that sessions and peers report with those that the interface counts."""

from __future__ import annotations

from dataclasses import dataclass

from outergrad_lab.bench.results import LinkResult
from outergrad_lab.peers.named import is_peer

RELATIVE = 0.03
MESSAGES_BYTES = 1024
"""Bytes per step and other site for gloo's additions and segments that TCP sends twice."""


@dataclass(frozen=True)
class Check:
    """Bytes reported for a method beside the counter of the interface, per step and site.

    Attributes:
        link: The link.
        method: The method.
        claimed_bytes: Bytes by `session.stats()`, or by a peer.
        counted_bytes: Bytes by the interface, less 66 bytes of headers per packet.
        allowed_bytes: Largest difference between them that is allowed.
    """

    link: str
    method: str
    claimed_bytes: float
    counted_bytes: float
    allowed_bytes: float

    @property
    def holds(self) -> bool:
        """True if they agree."""
        return abs(self.counted_bytes - self.claimed_bytes) <= self.allowed_bytes

    def __str__(self) -> str:
        who = "the peer" if is_peer(self.method) else "session.stats()"
        verdict = "agrees with" if self.holds else "DIFFERS from"
        return (
            f"{self.link}, {self.method}: {who} says {self.claimed_bytes:,.0f} bytes per "
            f"step, which {verdict} the {self.counted_bytes:,.0f} that the interface counted "
            f"(headers of packets taken off; allowed: 3% + 1 kB per other site)"
        )


def check(result: LinkResult, sites: int) -> list[Check]:
    """Compares both numbers for every method that counts its bytes."""
    return [
        Check(
            link=result.link,
            method=timing.method,
            claimed_bytes=timing.claimed_bytes,
            counted_bytes=timing.payload_bytes,
            allowed_bytes=RELATIVE * timing.claimed_bytes + MESSAGES_BYTES * (sites - 1),
        )
        for timing in result.timings
        if timing.claimed_bytes is not None
    ]
