"""A process group of a backend that is not PyTorch's: written in Python, as others register one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from outergrad.launch.simulate import gloo_group


class ForeignGroup(dist.ProcessGroup):
    """Lends another group's collectives, and has no backend, store or options of its own."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner = inner

    def getBackendName(self) -> str:  # noqa: N802
        return "foreign"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._inner.allreduce(tensors, opts or dist.AllreduceOptions())

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._inner.broadcast(tensors, opts)

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        return self._inner.send(tensors, to, tag)

    def recv(self, tensors: Any, of: int, tag: int) -> Any:
        return self._inner.recv(tensors, of, tag)


def foreign_group(
    store: dist.Store, rank: int, sites: int, timeout: timedelta = timedelta(seconds=20)
) -> ForeignGroup:
    """As `dist.Backend.register_backend` has it made."""
    return ForeignGroup(gloo_group(store, rank, sites, timeout))
