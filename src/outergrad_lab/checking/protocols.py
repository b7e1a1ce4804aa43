"""The protocols that can be checked, by name."""

from __future__ import annotations

from outergrad_lab.checking.exploring import Protocol
from outergrad_lab.checking.forwarding import ForwardingSite
from outergrad_lab.checking.votes import VotingSite

PROTOCOLS: dict[str, Protocol] = {"votes": VotingSite, "retain-and-forward": ForwardingSite}
"""`votes` is what the library does."""
