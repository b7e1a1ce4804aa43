"""The protocols that can be checked, by name."""

from __future__ import annotations

from outergrad_lab.checking.exploring import Protocol
from outergrad_lab.checking.forwarding import ForwardingSite, ImplyingSite
from outergrad_lab.checking.votes import VotingSite

PROTOCOLS: dict[str, Protocol] = {
    "votes": VotingSite,
    "retain-and-forward": ForwardingSite,
    "implied": ImplyingSite,
}
"""`retain-and-forward` is what the library does; on transports without a board, `votes`."""
