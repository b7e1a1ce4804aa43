"""Collectives by which peers exchange, with a count of the sent bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from outergrad.comm.cost import RingCost


class Sites:
    """Sites of a process group.

    Args:
        group: The process group; the default group if None.

    Attributes:
        sent_bytes: Payload bytes that this site has sent so far, as gloo sends them.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._cost = RingCost(dist.get_world_size() if group is None else group.size())
        self.sent_bytes = 0

    @property
    def number(self) -> int:
        """Number of sites."""
        return self._cost.sites

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Averages tensors over the sites by one all-reduce; shapes are the same everywhere."""
        total = self._sum(tensors)
        self.sent_bytes += self._cost.all_reduce(total.nbytes).sent
        return split_like(total / self.number, tensors)

    def gather(self, content: Tensor) -> list[Tensor]:
        """Returns every site's tensor, by one all-gather; shapes are the same everywhere."""
        found = [torch.empty_like(content) for _ in range(self.number)]
        dist.all_gather(found, content, group=self._group)
        self.sent_bytes += self._cost.all_gather(content.nbytes, 0).sent
        return found

    @torch.no_grad()
    def make_equal(self, tensors: Iterable[Tensor]) -> None:
        """Copies site 0's values to all sites, uncounted, since it is before the first step."""
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
    """Splits a vector into consecutive parts with the shapes of tensors."""
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
