"""Topology of a session: the ranks that take part, where a site is one rank."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from outergrad.comm.agree import agree, broadcast_all
from outergrad.core.protocols import Rules
from outergrad.core.transport import Comm, Transport
from outergrad.methods.dense import Dense
from outergrad.methods.local_steps import LocalSteps
from outergrad.session.description import shared_tensors
from outergrad.session.fragments import streamed
from outergrad.session.gossip_checks import is_gossip
from outergrad.session.inspect import Inspection, inspect
from outergrad.session.session import Session
from outergrad.session.settings import Settings
from outergrad.session.updates import SharedChanges
from outergrad.step.buffers import Kind


class Topology:
    """Topology of sites of one rank each.

    Args:
        site: transport to the other sites.

    Attributes:
        buffers: default of `distribute`'s argument of that name.
    """

    buffers: Kind = "broadcast"

    def __init__(self, site: Comm) -> None:
        self.site = site

    def look_at(
        self, model: nn.Module, method: Any, rules: Rules, *, by_sample: bool = False
    ) -> Inspection:
        """Inspects the model; without rules where weights travel, which have no factors.

        Raises:
            ValueError: the model or the method cannot be used.
        """
        if isinstance(method, LocalSteps):
            return streamed(inspect(model, method.method, {}), method)
        if is_gossip(method):
            return inspect(model, Dense(), {})
        return inspect(model, method, rules, by_sample=by_sample)

    def refuse_settings(self, **settings: Any) -> None:
        """Raises for settings that this topology cannot have; here there are none."""

    def agree(self, lines: Sequence[str], error: Exception | None) -> int:
        """Compares descriptions over all ranks, as `comm.agree`; returns their fingerprint."""
        return agree(self.site, lines, error)

    def make_equal(self, model: nn.Module, inspection: Inspection) -> list[Tensor]:
        """Overwrites parameters and buffers by the first site's; returns what can be compared."""
        tensors = [t for _, _, t in shared_tensors(model, inspection)]
        broadcast_all(self.site, tensors)
        return tensors

    def session(
        self, inspection: Inspection, agreed: int, settings: Settings, method: Any
    ) -> Session:
        """Returns the session of this rank, whose layers are not tapped yet."""
        if isinstance(method, LocalSteps):
            changes = SharedChanges(inspection, method)
            return Session(changes.inspection, self.site, agreed, settings, updates=changes)
        if is_gossip(method):
            from outergrad.session.gossip_steps import SharedWithNeighbours

            near = SharedWithNeighbours(inspection, method)
            return Session(near.inspection, self.site, agreed, settings, updates=near)
        return Session(inspection, self.site, agreed, settings)


def opened(
    transport: Transport, device: torch.device, group: Any, timeout: timedelta | None
) -> Comm:
    """Opens a transport with the user's `group` and `timeout`.

    Raises:
        ValueError: the transport does not go by one that the user has given.
        RuntimeError: there are no sites to reach.
    """
    given = {n: v for n, v in {"group": group, "timeout": timeout}.items() if v is not None}
    for name in given.keys() - transport.settings:
        raise ValueError(
            f"{name}= and transport={type(transport).__name__}: that does not go by it; leave it "
            f"out, and say it to the transport itself"
        )
    return transport.open(device, **given)
