"""The collectives that peers exchange by, and what a site has sent by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from outergrad.comm.cost import RingCost


class Sites:
    """The sites of a process group.

    Args:
        group: The sites; the default group if None.

    Attributes:
        sent_bytes: Payload that this site has sent so far, as gloo sends it.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._cost = RingCost(dist.get_world_size() if group is None else group.size())
        self.sent_bytes = 0

    @property
    def number(self) -> int:
        """How many there are."""
        return self._cost.sites

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The means over the sites of tensors of the same shapes everywhere; one all-reduce."""
        total = self._sum(tensors)
        self.sent_bytes += self._cost.all_reduce(total.nbytes).sent
        return split_like(total / self.number, tensors)

    def gather(self, content: Tensor) -> list[Tensor]:
        """What every site has of a tensor of the same shape everywhere; one all-gather."""
        found = [torch.empty_like(content) for _ in range(self.number)]
        dist.all_gather(found, content, group=self._group)
        self.sent_bytes += self._cost.all_gather(content.nbytes, 0).sent
        return found

    @torch.no_grad()
    def make_equal(self, tensors: Iterable[Tensor]) -> None:
        """Gives tensors the values of site 0: before the first step, so it is not counted."""
        own = list(tensors)
        first = dist.get_rank(self._group) == 0 if self._group is None else self._group.rank() == 0
        total = self._sum([x if first else torch.zeros_like(x) for x in own])
        for x, of_first in zip(own, split_like(total, own), strict=True):
            x.copy_(of_first)

    def _sum(self, tensors: Sequence[Tensor]) -> Tensor:
        total = torch.cat([x.detach().reshape(-1) for x in tensors])
        dist.all_reduce(total, group=self._group)
        return total


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Cuts a vector into the shapes of tensors, which it holds one after another."""
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
