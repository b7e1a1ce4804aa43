"""The surface of DistributedDataParallel over `og.distribute`, for PyTorch's own tests of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from weakref import WeakSet, finalize

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import outergrad as og

METHODS = {
    "auto": og.Auto(),
    "dense": og.Dense(),
    "dad": og.DAD(),
    "dad raw": og.DAD(reveal="activations"),
    "rank-dad": og.RankDAD(rank=64),
    "powersgd": og.PowerSGD(rank=64),
}
"""Ranks are above those of the tests' gradients, so that all of these are exact."""


class DistributedDataParallel(nn.Module):
    """A distributed model behind the constructor, attributes and methods of PyTorch's class.

    What concerns its buckets, hooks and GPUs has no meaning here and is passed over.
    """

    method: Any = og.Auto()
    """Of all that are made from now on."""
    _living: ClassVar[WeakSet[DistributedDataParallel]] = WeakSet()

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        *,
        forward_sync_buffers: bool | None = None,
        device_mesh: DeviceMesh | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if not any(p.requires_grad for p in module.parameters()):
            raise RuntimeError("no parameter of the module requires a gradient")
        if process_group is not None and device_mesh is not None:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if device_mesh is not None and device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, not {device_mesh}")
        self.module, self.require_backward_grad_sync = module, True
        self.device_ids, self.device_mesh = None, device_mesh
        group = process_group if device_mesh is None else device_mesh.get_group()
        self.process_group = dist.group.WORLD if group is None else group
        self.forward_sync_buffers = (
            broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        )
        self.parameters_to_ignore = {*getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
        self._distribute()

    def _distribute(self) -> None:
        """A module that is wrapped twice, or in two layers, is shared once."""
        if isinstance(self.module, DistributedDataParallel):
            self._session = self.module._session
            return
        for other in [*self._living]:
            if other.module is self.module:
                other._end()
        method, own = self.method, sorted(self.parameters_to_ignore)
        if own:
            shared = og.DAD() if isinstance(method, og.Auto) else method  # Auto is of whole models
            method = og.PerLayer({**dict.fromkeys(own, og.Local()), "*": shared})
        self._session = og.distribute(
            self.module,
            method,
            group=self.process_group,
            buffers="broadcast" if self.forward_sync_buffers else "local",
        )
        self._end = finalize(self, self._session.detach)
        self._end.atexit = False
        self._living.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {
            k: v for k, v in self.__dict__.items() if k not in ("_session", "_end", "process_group")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = dist.group.WORLD
        self._distribute()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.require_backward_grad_sync:
            return self.module(*args, **kwargs)
        with self._session.no_sync():  # for its backward, see `no_sync`
            return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            with self._session.no_sync():
                yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        with ExitStack() as stack:
            if enable:
                stack.enter_context(
                    self._session.join(divide_by_initial_world_size=divide_by_initial_world_size)
                )
            yield

    @property
    def _authoritative_rank(self) -> int:
        """The rank whose replica all had at the end of `join`."""
        return self._session._exchange.attendance.last_active

    broadcast_bucket_size = 250 * 2**20
    """Bytes, by which PyTorch's own helper sends a module's state."""

    def _set_static_graph(self) -> None:
        """Every graph may be another one here."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Outputs are not cloned."""

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]


def by(method: str) -> type[DistributedDataParallel]:
    """The class, whose next instances go by this method."""
    DistributedDataParallel.method = METHODS[method]
    return DistributedDataParallel


def detach_all() -> None:
    """Ends the sessions that a test left."""
    for model in [*DistributedDataParallel._living]:
        model._end()
