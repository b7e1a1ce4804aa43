"""Collectives for transports that can do no more than send a tensor to each site."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outergrad.core.cost import CostModel, Traffic
from outergrad.core.transport import Comm

Arriving = Callable[[], Sequence[Tensor]]
"""Waits for what each site had for this one, in the order of sites."""


class MessageComm(Comm):
    """All collectives of messages: a class that derives from it writes `send`, `give_up`, `close`.

    Choose it for a transport of one's own; sums are made at every site, of all sites' tensors.

    Args:
        rank: of this site.
        cost: of the transport; bytes are counted by it.
        device: of the tensors.
        patience_s: how long a message may take.
    """

    def __init__(self, rank: int, cost: CostModel, device: torch.device, patience_s: float) -> None:
        self.rank, self.world_size, self.cost = rank, cost.sites, cost
        self.device, self.patience_s = device, patience_s
        self.sent_bytes, self.received_bytes = 0, 0

    @abstractmethod
    def send(self, parts: Sequence[Tensor], lane: int) -> Arriving:
        """Sends each site, this one too, a tensor, which may be changed as soon as it returns.

        Args:
            parts: in the order of sites.
            lane: messages of one lane arrive in the order in which they were sent.

        Returns:
            What waits for those of the others, of the same collective.
        """
        ...

    def all_reduce(self, t: Tensor) -> _Arrival:
        """Adds up in the order of sites, the same on every one."""
        return self._started([t] * self.world_size, self.cost.all_reduce(t.nbytes), _sum_into(t))

    def all_gather(self, t: Tensor, sizes: Sequence[int], lane: int = 0) -> _Arrival:
        """This site's to every other."""
        others = (sum(sizes) - sizes[self.rank]) * t.itemsize
        traffic = self.cost.all_gather(t.nbytes, others)
        return self._started([t] * self.world_size, traffic, list, lane)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> _Arrival:
        """To each its own."""
        own = sum(part.nbytes for part in parts) - parts[self.rank].nbytes
        others = (sum(sizes) - sizes[self.rank]) * parts[0].itemsize
        return self._started(parts, self.cost.all_to_all(own, others), list)

    def broadcast(self, t: Tensor) -> None:
        """Takes what the first site sends; it is not counted."""
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
        """Blocks until all messages are there."""
        return self._then(self._arriving())


def _sum_into(t: Tensor) -> Callable[[Sequence[Tensor]], Tensor]:
    def summed(parts: Sequence[Tensor]) -> Tensor:
        t.copy_(parts[0])
        for part in parts[1:]:
            t.add_(part)
        return t

    return summed
