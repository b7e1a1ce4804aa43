"""Collectives for transports that can only send a tensor to each site."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outergrad.core.cost import CostModel, Traffic
from outergrad.core.transport import Comm

Arriving = Callable[[], Sequence[Tensor]]
"""Waits for the tensors that the sites sent to this one, and returns them in rank order."""


class MessageComm(Comm):
    """Collectives made of messages; a subclass implements `send`, `give_up` and `close`.

    Choose it for a transport of one's own. Every site sums the tensors of all sites itself.

    Args:
        rank: of this site.
        cost: cost model of the transport, by which bytes are counted.
        device: of the tensors.
        patience_s: timeout of a message, seconds.
    """

    def __init__(self, rank: int, cost: CostModel, device: torch.device, patience_s: float) -> None:
        self.rank, self.world_size, self.cost = rank, cost.sites, cost
        self.device, self.patience_s = device, patience_s
        self.sent_bytes, self.received_bytes = 0, 0

    @abstractmethod
    def send(self, parts: Sequence[Tensor], lane: int) -> Arriving:
        """Sends a tensor to each site, this one too; the caller may change them once it returns.

        Args:
            parts: one tensor per site, in rank order.
            lane: messages of one lane arrive in the order in which they were sent.

        Returns:
            A call that waits for the tensors that the sites sent in the same collective.
        """
        ...

    def all_reduce(self, t: Tensor) -> _Arrival:
        """Sums t over the sites in place, in rank order: every site gets the same bits."""
        return self._started([t] * self.world_size, self.cost.all_reduce(t.nbytes), _sum_into(t))

    def all_gather(self, t: Tensor, sizes: Sequence[int], lane: int = 0) -> _Arrival:
        """Gathers every site's tensor on every site."""
        others = (sum(sizes) - sizes[self.rank]) * t.itemsize
        traffic = self.cost.all_gather(t.nbytes, others)
        return self._started([t] * self.world_size, traffic, list, lane)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> _Arrival:
        """Sends each site its own tensor."""
        own = sum(part.nbytes for part in parts) - parts[self.rank].nbytes
        others = (sum(sizes) - sizes[self.rank]) * parts[0].itemsize
        return self._started(parts, self.cost.all_to_all(own, others), list)

    def broadcast(self, t: Tensor) -> None:
        """Overwrites t with rank 0's; its bytes are not counted."""
        t.copy_(self.send([t] * self.world_size, 0)()[0])

    def _started(
        self,
        parts: Sequence[Tensor],
        traffic: Traffic,
        then: Callable[[Sequence[Tensor]], Any],
        lane: int = 0,
    ) -> _Arrival:
        self.sent_bytes += traffic.sent
        self.received_bytes += traffic.received
        return _Arrival(self.send(parts, lane), then)


class _Arrival:
    """A collective under way."""

    def __init__(self, arriving: Arriving, then: Callable[[Sequence[Tensor]], Any]) -> None:
        self._arriving, self._then = arriving, then

    def wait(self) -> Any:
        return self._then(self._arriving())


def _sum_into(t: Tensor) -> Callable[[Sequence[Tensor]], Tensor]:
    def summed(parts: Sequence[Tensor]) -> Tensor:
        t.copy_(parts[0])
        for part in parts[1:]:
            t.add_(part)
        return t

    return summed
