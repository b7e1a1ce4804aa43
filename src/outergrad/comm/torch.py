"""The collectives of torch.distributed, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outergrad._types import ExchangeError


@contextmanager
def _transport() -> Iterator[None]:
    """Gives the errors of a transport a type of their own."""
    try:
        yield
    except RuntimeError as error:
        raise ExchangeError(str(error)) from error


class Ready:
    """Work that is done: what a single site has."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        """The result, at once."""
        return self._result


class TorchWork:
    """A collective of torch.distributed under way."""

    def __init__(self, work: dist.Work, result: Callable[[], Any]) -> None:
        self._work, self._result = work, result

    def wait(self) -> Any:
        """Blocks for the transfer (on CUDA: orders the current stream behind it)."""
        with _transport():
            self._work.wait()
        return self._result()


class TorchComm:
    """Collectives over a process group, for tensors of one device.

    A gloo group moves CUDA tensors through host memory; so do headers, so that reading them does
    not stop the device.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self.rank, self.world_size = group.rank(), group.size()
        self.sent_bytes = 0
        self.device = device
        self._host = torch.device("cpu") if _has_backend(group, "cpu") else device
        self._wire = device if _has_backend(group, device.type) else self._host

    def all_reduce(self, t: Tensor) -> Ready | TorchWork:
        """Sums t over the sites in place, on its own device.

        Counts what a ring sends: 2 (S - 1) / S of the tensor.
        """
        if self.world_size == 1:
            return Ready(t)
        self.sent_bytes += ring_bytes(t.nbytes, self.world_size)
        staged = t if t.device in (self._wire, self._host) else t.to(self._wire)
        with _transport():
            work = dist.all_reduce(staged, group=self._group, async_op=True)
        return TorchWork(work, lambda: t if staged is t else t.copy_(staged))  # type: ignore

    def all_gather(self, t: Tensor, sizes: Sequence[int]) -> Ready | TorchWork:
        """Every site's 1-D tensor on every site, straight from its owner.

        A ring would cost S - 1 delays; all pairs at once cost one.

        Args:
            t: this site's tensor.
            sizes: its length on each site.
        """
        if self.world_size == 1:
            return Ready([t])
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        self.sent_bytes += t.nbytes * len(others)
        staged = t if t.device in (self._wire, self._host) else t.to(self._wire)
        inputs = staged if len(others) == 1 else staged.repeat(len(others))
        incoming = [0 if rank == self.rank else size for rank, size in enumerate(sizes)]
        outgoing = [0 if rank == self.rank else len(t) for rank in range(self.world_size)]
        output = staged.new_empty(sum(incoming))
        with _transport():
            work = dist.all_to_all_single(
                output, inputs, incoming, outgoing, group=self._group, async_op=True
            )

        def parts() -> list[Tensor]:
            split = list(output.to(t.device).split(incoming))
            split[self.rank] = t
            return split

        return TorchWork(work, parts)  # type: ignore

    def broadcast(self, t: Tensor) -> None:
        """Overwrites t with rank 0's."""
        if self.world_size == 1:
            return
        staged = t.to(self._wire).contiguous()
        with _transport():
            dist.broadcast(staged, group=self._group, group_src=0)
        if staged is not t:
            t.copy_(staged)

    def control(self, values: Sequence[int]) -> Tensor:
        """An int64 tensor where collectives on it do not disturb the device, if possible."""
        return torch.tensor(values, dtype=torch.int64, device=self._host)


def ring_bytes(nbytes: int, sites: int) -> int:
    """Bytes that one site sends in a ring all-reduce."""
    return 2 * (sites - 1) * nbytes // sites


def _has_backend(group: dist.ProcessGroup, device: str) -> bool:
    """Whether the group moves tensors of this type of device; gloo stages CUDA through host."""
    try:
        name = group._get_backend(torch.device(device)).name().lower()
    except RuntimeError:
        return False
    return device == "cpu" or name != "gloo"
