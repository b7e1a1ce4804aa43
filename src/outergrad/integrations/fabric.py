"""Lightning Fabric: a DDP strategy whose models are `og.DistributedDataParallel`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from outergrad.core.packages import how_to_install
from outergrad.core.protocols import Method, Policy
from outergrad.methods.local_steps import LocalSteps
from outergrad.session.ddp import DistributedDataParallel

try:
    from lightning.fabric.strategies.ddp import DDPStrategy
except ImportError as error:
    _needs = "outergrad.integrations.fabric needs lightning: "
    raise ImportError(_needs + how_to_install("lightning")) from error


class OutergradStrategy(DDPStrategy):
    """Fabric's DDP strategy by outergrad: `Fabric(strategy=OutergradStrategy(og.DAD()))`.

    `fabric.setup(model, optimizer)` wraps the model in `og.DistributedDataParallel`, and
    `fabric.no_backward_sync` leaves gradients unshared. The session is
    `fabric_model._forward_module.session`.

    Args:
        method: as for `og.distribute`.
        distributes: other settings of `og.distribute`, such as `recorder` or `rules`.
        **settings: settings of Fabric's `DDPStrategy`, such as `timeout`, and those of DDP.
    """

    def __init__(
        self,
        method: Method | Policy | LocalSteps | None = None,
        *,
        distributes: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self._about = {**self._ddp_kwargs, **(distributes or {}), "method": method}
        self._backward_sync_control: Any = _SyncControl()

    def setup_module(self, module: nn.Module) -> Any:
        """Wraps a model; it is on its device by now."""
        ids = self._determine_ddp_device_ids()
        return DistributedDataParallel(module, device_ids=ids, **self._about)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any | Tensor]:
        """Returns the state of a model, without the wrapper's prefix."""
        return super().get_module_state_dict(_unwrapped(module))

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any | Tensor], strict: bool = True
    ) -> None:
        """Loads such a state."""
        super().load_module_state_dict(_unwrapped(module), state_dict, strict)


class _SyncControl:
    """Fabric's way to leave a backward unshared."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not enabled:
            return nullcontext()
        if not isinstance(module, DistributedDataParallel):
            raise TypeError(
                f"fabric.no_backward_sync is for a model of fabric.setup, not {type(module)}"
            )
        return module.no_sync()


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module
