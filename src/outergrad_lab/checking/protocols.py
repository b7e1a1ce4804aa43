"""The protocols that can be checked, by name."""

from __future__ import annotations

from outergrad_lab.checking.exploring import Protocol
from outergrad_lab.checking.forwarding import ForwardingSite
from outergrad_lab.checking.implying import ImplyingSite
from outergrad_lab.checking.votes import VotingSite

PROTOCOLS: dict[str, Protocol] = {
    "votes": VotingSite,
    "retain-and-forward": ForwardingSite,
    "implied": ImplyingSite,
}
"""The library does what is `implied`, and `retain-and-forward` where sites vote on a step; on
transports without a board, `votes`."""
