"""Who takes part in a session: sites of one rank each, or of several."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

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
from outergrad.session.mesh.levels import Mesh
from outergrad.session.mesh.topology import MeshTopology
from outergrad.session.session import Session
from outergrad.session.settings import Settings
from outergrad.step.buffers import Kind


class Topology(Protocol):
    """The ranks of a session, and what depends on how they stand to each other."""

    site: TorchComm
    """To the other sites."""
    buffers: Kind
    """What becomes of buffers, unless the user says."""

    def look_at(self, model: nn.Module, method: Any, rules: Rules) -> Inspection:
        """What is shared of a model.

        Raises:
            ValueError: the model or the method cannot be used.
        """
        ...

    def refuse_settings(
        self,
        *,
        weighting: str,
        max_bad_steps: int | None,
        buffers: str | None,
        verify_every: int | None,
    ) -> None:
        """Checks that settings of `distribute` mean something here.

        Raises:
            ValueError: names one that does not, with the remedy.
        """
        ...

    def agree(self, lines: Sequence[str], error: Exception | None) -> int:
        """As `comm.agree`, over all ranks."""
        ...

    def make_equal(self, model: nn.Module, inspection: Inspection) -> list[Tensor]:
        """Overwrites parameters and buffers by the first site's; returns what can be compared."""
        ...

    def session(
        self, inspection: Inspection, agreed: int, settings: Settings, method: Any
    ) -> Session:
        """The session of this rank, whose layers are not tapped yet."""
        ...


class SiteTopology:
    """Sites of one rank each.

    Args:
        group: the sites; the default group if None.
        device: of the model.
        timeout: as for `distribute`.
    """

    buffers: Kind = "broadcast"

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta | None
    ) -> None:
        self.site = TorchComm(_group(group), device, timeout)

    def look_at(self, model: nn.Module, method: Any, rules: Rules) -> Inspection:
        """What is shared; a change of the weights has no factors, so that no rule is of use."""
        if isinstance(method, LocalSteps):
            return inspect(model, method.method, {})
        return inspect(model, method, rules)

    def refuse_settings(self, **_: Any) -> None:
        """All settings mean something."""

    def agree(self, lines: Sequence[str], error: Exception | None) -> int:
        """All sites."""
        return agree(self.site, lines, error)

    def make_equal(self, model: nn.Module, inspection: Inspection) -> list[Tensor]:
        """Overwrites parameters and buffers by rank 0's."""
        tensors = [t for _, _, t in shared_tensors(model, inspection)]
        broadcast_all(self.site, tensors)
        return tensors

    def session(
        self, inspection: Inspection, agreed: int, settings: Settings, method: Any
    ) -> Session:
        """The session of this site."""
        if isinstance(method, LocalSteps):
            return LocalStepsSession(inspection, self.site, agreed, settings, method)
        return Session(inspection, self.site, agreed, settings)


def topology_of(
    group: dist.ProcessGroup | None,
    mesh: Mesh | None,
    device: torch.device,
    timeout: timedelta | None,
) -> Topology:
    """Decides, once, how the ranks stand to each other.

    Raises:
        ValueError: both a group and a mesh say who takes part, or the mesh has other dimensions.
        RuntimeError: there is no process group.
    """
    if mesh is None:
        return SiteTopology(group, device, timeout)
    if group is not None:
        raise ValueError("mesh= and group= both say who takes part: pass one of them")
    return MeshTopology(mesh, device, timeout)


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
