"""Protocols that can be checked, by name."""

from __future__ import annotations

from outergrad_lab.checking.committing import CommittingSite
from outergrad_lab.checking.exploring import Protocol
from outergrad_lab.checking.votes import VotingSite

PROTOCOLS: dict[str, Protocol] = {"commit": CommittingSite, "votes": VotingSite}
"""The library's commit machine is `commit`; without a board it can only do `votes`."""
