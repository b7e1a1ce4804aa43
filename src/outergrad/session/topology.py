"""Who takes part in a session, where a site is one rank."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outergrad.comm.agree import agree, broadcast_all
from outergrad.comm.torch import TorchComm
from outergrad.core.protocols import Rules
from outergrad.methods import LocalSteps
from outergrad.session.description import shared_tensors
from outergrad.session.inspect import Inspection, inspect
from outergrad.session.local_steps import LocalStepsSession
from outergrad.session.session import Session
from outergrad.session.settings import Settings
from outergrad.step.buffers import Kind


class Topology:
    """Sites of one rank each.

    Args:
        group: the sites; the default group if None.
        device: of the model.
        timeout: as for `distribute`.

    Attributes:
        site: to the other sites.
        buffers: what becomes of buffers, unless the user says.
    """

    buffers: Kind = "broadcast"

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta | None
    ) -> None:
        self.site = TorchComm(_group(group), device, timeout)

    def look_at(self, model: nn.Module, method: Any, rules: Rules) -> Inspection:
        """What is shared; a change of the weights has no factors, so that no rule is of use.

        Raises:
            ValueError: the model or the method cannot be used.
        """
        if isinstance(method, LocalSteps):
            return inspect(model, method.method, {})
        return inspect(model, method, rules)

    def refuse_settings(self, **settings: Any) -> None:
        """Raises for settings that mean nothing here: there are none."""

    def agree(self, lines: Sequence[str], error: Exception | None) -> int:
        """As `comm.agree`, over all ranks."""
        return agree(self.site, lines, error)

    def make_equal(self, model: nn.Module, inspection: Inspection) -> list[Tensor]:
        """Overwrites parameters and buffers by the first site's; returns what can be compared."""
        tensors = [t for _, _, t in shared_tensors(model, inspection)]
        broadcast_all(self.site, tensors)
        return tensors

    def session(
        self, inspection: Inspection, agreed: int, settings: Settings, method: Any
    ) -> Session:
        """The session of this rank, whose layers are not tapped yet."""
        if isinstance(method, LocalSteps):
            return LocalStepsSession(inspection, self.site, agreed, settings, method)
        return Session(inspection, self.site, agreed, settings)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is not None:
        return group
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group('gloo') first, in a "
            "program started by torchrun, or pass group="
        )
    default = dist.group.WORLD
    assert default is not None
    return default
