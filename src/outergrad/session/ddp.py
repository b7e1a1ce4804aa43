"""`DistributedDataParallel` over `distribute()`: a script of PyTorch's class changes one import."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from outergrad.core.protocols import Method, Policy
from outergrad.core.transport import Transport
from outergrad.methods.dad import DAD
from outergrad.methods.local_steps import LocalSteps
from outergrad.methods.per_layer import Local, PerLayer
from outergrad.session.attach import distribute
from outergrad.session.session import Session

_WRAPPERS: WeakKeyDictionary[nn.Module, ref[DistributedDataParallel]] = WeakKeyDictionary()
"""The last wrapper of each module: one that is wrapped again is shared by the new one alone."""
_REMEDIES = {
    "delay_all_reduce_named_params": "outergrad orders its messages itself",
    "param_to_hook_all_reduce": "outergrad orders its messages itself",
    "mixed_precision": "cast by torch.autocast, or make the model bf16 before you wrap it",
}
"""What to do instead of some arguments of PyTorch's class."""


class DistributedDataParallel(nn.Module):
    """PyTorch's `DistributedDataParallel`, whose gradients travel by a method of outergrad.

    Choose it where a script is written for the wrapper: it asks for `model.module`, sets
    `model.require_backward_grad_sync`, or saves keys that begin with ``module.``. The wrapper is
    `distribute(module, method)` behind the surface of PyTorch's class. Where the plain module is
    used, call `og.distribute` itself.

    As in PyTorch's class, the last forward decides whether a backward is shared: of a forward
    under `no_sync`, or with `require_backward_grad_sync = False`, gradients stay here and are
    shared with those of the next that is.

    Args:
        module: the model.
        device_ids: at most one device, which inputs are moved to, as PyTorch's class does.
        output_device: None, or that device.
        dim: 0.
        broadcast_buffers: True to give all sites rank 0's buffers, such as running statistics, in
            every step that forwards write to them; False to leave each site its own.
        init_sync: taken, and always done: parameters and buffers are made equal to rank 0's.
        process_group: of the sites; the default group if None.
        bucket_cap_mb: taken; a method has `bucket_bytes=`.
        find_unused_parameters: taken: every graph may be another one.
        check_reduction: taken.
        gradient_as_bucket_view: taken: gradients are views of messages where nobody notices.
        static_graph: taken: a graph may always change.
        delay_all_reduce_named_params: refused.
        param_to_hook_all_reduce: refused.
        mixed_precision: refused.
        device_mesh: of one dimension, instead of a process group.
        skip_all_reduce_unused_params: taken.
        bucket_cap_mb_list: taken.
        batched_grad_copy: taken.
        forward_sync_buffers: as `broadcast_buffers`, of newer versions of PyTorch.
        method: how gradients travel, as in `distribute`.
        transport: how the sites reach each other, as in `distribute`.
        **settings: other arguments of `distribute`, such as `recorder`, `timeout` or `mesh`.

    Attributes:
        module: the model.
        session: the session of the model, see `og.Session`.
        require_backward_grad_sync: False to leave gradients of the next forwards unshared.

    Raises:
        RuntimeError: no parameter of the module requires a gradient, or `distribute` refuses it.
        ValueError: an argument cannot mean anything here; the error says what to do instead.
    """

    session: Session

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        method: Method | Policy | LocalSteps | None = None,
        transport: Transport | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        given = (delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision)
        for value, (name, remedy) in zip(given, _REMEDIES.items(), strict=True):
            if value is not None:
                raise ValueError(f"DistributedDataParallel: {name}= means nothing here: {remedy}")
        if not any(p.requires_grad for p in module.parameters()):
            raise RuntimeError(
                "DistributedDataParallel is not needed for a module without parameters that "
                "require a gradient"
            )
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(
                f"DistributedDataParallel: device_ids={device_ids!r}: start one process per device"
            )
        self.module = module
        self.device_ids = None if not device_ids else [torch.device(_device(device_ids[0]))]
        self.output_device, self.dim, self.device_mesh = output_device, dim, device_mesh
        self.process_group = _group(process_group, device_mesh)
        found = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.broadcast_buffers = self.forward_sync_buffers = found is not False
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.parameters_to_ignore = {*getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._unshared: AbstractContextManager[None] | None = None
        """The context of `session.no_sync()`, entered while gradients stay here."""
        self._settings = {"method": method, "transport": transport, **settings}
        self._distribute()

    def _distribute(self) -> None:
        if isinstance(self.module, DistributedDataParallel):  # wrapped twice, shared once
            self.session = self.module.session
            return
        before = _WRAPPERS[self.module]() if self.module in _WRAPPERS else None
        if before is not None:
            before.session.detach()
        settings = dict(self._settings)
        if self.parameters_to_ignore:
            shared = DAD() if settings["method"] is None else settings["method"]
            own = dict.fromkeys(sorted(self.parameters_to_ignore), Local())
            settings["method"] = PerLayer({**own, "*": shared})
        if settings["transport"] is None and settings.get("mesh") is None:
            settings["group"] = self.process_group
        settings.setdefault("buffers", "broadcast" if self.broadcast_buffers else "local")
        self.session = distribute(self.module, **settings)
        _WRAPPERS[self.module] = ref(self)
        # A module that outlives its wrapper is plain again, as with PyTorch's reducer.
        finalize(self, self.session.release).atexit = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the module; with gradients, decides whether its backward is shared."""
        if torch.is_grad_enabled():
            self._share(self.require_backward_grad_sync)
        if self.device_ids is not None:
            inputs, kwargs = tree_map(self._moved, (inputs, kwargs))
        return self.module(*inputs, **kwargs)

    def _moved(self, value: Any) -> Any:
        assert self.device_ids is not None
        if isinstance(value, Tensor):
            return value.to(self.device_ids[0], non_blocking=True)
        return value

    def _share(self, shared: bool) -> None:
        if shared and self._unshared is not None:
            unshared, self._unshared = self._unshared, None
            unshared.__exit__(None, None, None)
        elif not shared and self._unshared is None:
            unshared = self.session.no_sync()
            unshared.__enter__()
            self._unshared = unshared

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leaves gradients of forwards inside it unshared, until a forward outside is shared."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[Any]:
        """Lets the sites run the loop inside it over unequal numbers of batches.

        Args:
            divide_by_initial_world_size: True to divide by the number of all sites, False by that
                of sites that still have batches.
            enable: False to do nothing.
            throw_on_early_termination: False.

        Raises:
            ValueError: `throw_on_early_termination` is True.
        """
        if throw_on_early_termination:
            raise ValueError(
                "DistributedDataParallel.join: throw_on_early_termination= means nothing here: "
                "without join() a site that ends early raises og.SiteLostError on the others"
            )
        if not enable:
            return nullcontext()
        return self.session.join(divide_by_initial_world_size=divide_by_initial_world_size)

    # -- copies ---------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what cannot be pickled, as PyTorch's class does."""
        own = ("session", "process_group", "_unshared")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Distributes the module over the default group: call it on every site."""
        super().__setstate__(state)
        self.process_group, self._unshared = _group(None, None), None
        self._distribute()

    # -- what has no meaning here ---------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Refuses a hook of PyTorch's: `method=` says how gradients travel.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "DistributedDataParallel.register_comm_hook means nothing here: gradients travel by "
            "method=, such as og.PowerSGD(rank=4) or og.RankDAD(rank=4, wire=og.wire.BF16())"
        )

    _register_builtin_comm_hook = register_comm_hook

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        raise RuntimeError(
            "DistributedDataParallel._get_ddp_logging_data means nothing here: "
            "model.session.stats() and model.session.coverage() say what travels"
        )

    def _set_static_graph(self) -> None:
        self.static_graph = True

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        ignored = [*params_and_buffers_to_ignore]
        module._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]


def _group(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    if group is not None and mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh is not None and mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, not {mesh}")
    found = group if mesh is None else mesh.get_group()
    return dist.group.WORLD if found is None else found


def _device(device: Any) -> Any:
    return f"cuda:{device}" if isinstance(device, int) else device
