"""outergrad's DistributedDataParallel with what PyTorch's own tests of that class ask besides."""

from __future__ import annotations

from typing import Any

import outergrad as og
from outergrad.session.ddp import _WRAPPERS

METHODS = {
    "auto": og.Auto(),
    "dense": og.Dense(),
    "dad": og.DAD(),
    "dad raw": og.DAD(reveal="activations"),
    "rank-dad": og.RankDAD(rank=64),
    "powersgd": og.PowerSGD(rank=64),
}
"""Ranks are above those of the tests' gradients, so that all of these are exact."""


class DistributedDataParallel(og.DistributedDataParallel):
    """By the method that `by` has named; what asks for DDP's buckets and hooks is passed over."""

    method: Any = og.Auto()
    """Of all that are made from now on."""

    def __init__(self, module: Any, *args: Any, **settings: Any) -> None:
        if not isinstance(module, DistributedDataParallel):
            ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
            auto = isinstance(self.method, og.Auto) and ignored  # which is of whole models
            settings["method"] = og.DAD() if auto else self.method
        super().__init__(module, *args, **settings)

    @property
    def _authoritative_rank(self) -> int:
        """The rank whose replica all had at the end of `join`."""
        return self.session._exchange.attendance.last_active

    broadcast_bucket_size = 250 * 2**20
    """Bytes, by which PyTorch's own helper sends a module's state."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Outputs are not cloned."""


def by(method: str) -> type[DistributedDataParallel]:
    """The class, whose next instances go by this method."""
    DistributedDataParallel.method = METHODS[method]
    return DistributedDataParallel


def detach_all() -> None:
    """Ends the sessions that a test left."""
    for wrapper in [*_WRAPPERS.values()]:
        model = wrapper()
        if model is not None:
            model.session.detach()
