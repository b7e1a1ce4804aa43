"""The collectives of torch.distributed, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outergrad._types import ExchangeError

_TAG = 0x6F67
"""Keeps messages apart from point-to-point messages of the user's on the same group."""


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
    """Transfers of torch.distributed under way."""

    def __init__(self, works: Sequence[dist.Work], result: Callable[[], Any]) -> None:
        self._works, self._result = works, result

    def wait(self) -> Any:
        """Blocks for the transfer (on CUDA: orders the current stream behind it)."""
        with _transport():
            for work in self._works:
                work.wait()
        return self._result()


class TorchComm:
    """Collectives over a process group, for tensors of one device.

    A gloo group moves CUDA tensors through host memory; so do headers, so that reading them does
    not stop the device.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank, self.world_size = group.rank(), group.size()
        self.sent_bytes = self.received_bytes = 0
        self.device = device
        self._kept: Tensor | None = None
        self._host = torch.device("cpu") if _has_backend(group, "cpu") else device
        self._wire = device if _has_backend(group, device.type) else self._host

    def all_reduce(self, t: Tensor) -> Ready | TorchWork:
        """Sums t over the sites in place, on its own device.

        Counts what a ring sends: 2 (S - 1) / S of the tensor.
        """
        if self.world_size == 1:
            return Ready(t)
        self.sent_bytes += ring_bytes(t.nbytes, self.world_size)
        self.received_bytes += ring_bytes(t.nbytes, self.world_size)
        staged = self._staged(t)
        with _transport():
            work = dist.all_reduce(staged, group=self.group, async_op=True)
        assert work is not None
        return TorchWork([work], lambda: t if staged is t else t.copy_(staged))

    def all_gather(self, t: Tensor, sizes: Sequence[int], lane: int = 0) -> Ready | TorchWork:
        """Every site's 1-D tensor on every site, straight from its owner.

        A ring would cost S - 1 delays; all pairs at once cost one.

        Args:
            t: this site's tensor.
            sizes: its length on each site, at least 1.
            lane: messages of one lane do not wait for those of another (on gloo).
        """
        if self.world_size == 1:
            return Ready([t])
        staged = self._staged(t)
        return self._exchanged([staged] * self.world_size, sizes, t.device, lane)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Ready | TorchWork:
        """Another 1-D tensor to every site, straight to it; in one delay, like `all_gather`.

        Args:
            parts: for each site what it gets; what is for this one stays here.
            sizes: the length of what each site has for this one, at least 1.
        """
        if self.world_size == 1:
            return Ready([parts[0]])
        return self._exchanged([self._staged(t) for t in parts], sizes, parts[0].device)

    def _staged(self, t: Tensor) -> Tensor:
        """Where the group can send it from."""
        return t if t.device in (self._wire, self._host) else t.to(self._wire)

    def _exchanged(
        self,
        outgoing: Sequence[Tensor],
        sizes: Sequence[int],
        device: torch.device,
        lane: int = 0,
    ) -> TorchWork:
        """What every site has for this one, on the device."""
        own = outgoing[self.rank]
        self.sent_bytes += sum(t.nbytes for t in outgoing) - own.nbytes
        parts = [own.new_empty(size) for size in sizes]
        self.received_bytes += sum(t.nbytes for t in parts) - parts[self.rank].nbytes
        with _transport():
            works = self._exchange(outgoing, parts, _TAG + lane)

        def result() -> list[Tensor]:
            parts[self.rank] = outgoing[self.rank]  # which lives until all has been sent
            return [part.to(device) for part in parts]

        return TorchWork(works, result)

    def _exchange(
        self, outgoing: Sequence[Tensor], parts: list[Tensor], tag: int
    ) -> list[dist.Work]:
        """Starts to send every other site its tensor and to receive the other parts."""
        others = [(self.rank + k) % self.world_size for k in range(1, self.world_size)]
        if parts[0].device.type == "cuda":
            sends = [
                dist.P2POp(dist.isend, outgoing[o], group=self.group, group_peer=o) for o in others
            ]
            receive = [(parts[o], o) for o in others]
            receives = [
                dist.P2POp(dist.irecv, part, group=self.group, group_peer=o) for part, o in receive
            ]
            return list(dist.batch_isend_irecv([*receives, *sends]))
        # gloo: a receive that is posted behind a send waits for it, and the link runs one way at
        # a time; so do gloo's own all_to_all and, less, its all_gather (docs/design.md).
        group = self.group
        works = [dist.irecv(parts[o], group=group, group_src=o, tag=tag) for o in reversed(others)]
        works += [dist.isend(outgoing[o], group=group, group_dst=o, tag=tag) for o in others]
        return [work for work in works if work is not None]

    def broadcast(self, t: Tensor) -> None:
        """Overwrites t with rank 0's."""
        if self.world_size == 1:
            return
        staged = t.to(self._wire).contiguous()
        with _transport():
            dist.broadcast(staged, group=self.group, group_src=0)
        # A thread of gloo's may hold it a little longer; were it the last to do so while the
        # interpreter shuts down, the process would abort.
        self._kept = staged
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
