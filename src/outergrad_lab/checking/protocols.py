"""Protocols that can be checked, by name."""

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
"""The library uses `implied`; `retain-and-forward` if sites vote; `votes` without a board."""
