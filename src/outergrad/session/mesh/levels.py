"""The ranks of a mesh: sites, and the devices of one site."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from outergrad.comm.agree import agree, broadcast_all
from outergrad.comm.torch import TorchComm
from outergrad.methods import EDAD, LocalSteps, PerLayer
from outergrad.session.inspect import Inspection

_REMEDY = (
    "torch.distributed.device_mesh.init_device_mesh(device_type, (sites, devices_per_site), "
    'mesh_dim_names=("site", "local"))'
)


class Mesh(Protocol):
    """What is needed of a `DeviceMesh`."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The names of its dimensions."""
        ...

    def get_group(self, mesh_dim: Any = None) -> dist.ProcessGroup:
        """The ranks that differ from this one in this dimension alone."""
        ...


class Levels:
    """Two process groups that cross in this rank.

    Attributes:
        site: the ranks with this one's place in every other site: the slow link.
        local: the ranks of this site: the fast one.
    """

    def __init__(
        self,
        site: dist.ProcessGroup,
        local: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta | None = None,
    ) -> None:
        self.site = TorchComm(site, device, timeout)
        self.local = TorchComm(local, device, timeout)

    @property
    def ranks(self) -> int:
        """Of all sites."""
        return self.site.world_size * self.local.world_size

    @property
    def number(self) -> int:
        """Of this rank among all."""
        return self.site.rank * self.local.world_size + self.local.rank

    def agree(self, lines: Sequence[str], error: Exception | None) -> int:
        """As `comm.agree`, over all ranks: first inside the sites, then between them.

        Raises:
            ValueError: on every rank, if two differ or one has an error.
        """
        try:
            agree(self.local, lines, error, who=f"site {self.site.rank}, local rank")
        except Exception as raised:
            error = error or raised
        return agree(self.site, lines, error)

    def broadcast_all(self, tensors: Sequence[Tensor]) -> None:
        """Makes tensors equal to those of the first rank; between sites each travels once."""
        if self.local.rank == 0:
            broadcast_all(self.site, tensors)
        broadcast_all(self.local, tensors)


def levels_of(mesh: Mesh, device: torch.device, timeout: timedelta | None = None) -> Levels:
    """The groups of a mesh, whose dimensions may stand in either order.

    Raises:
        ValueError: its dimensions have other names.
    """
    names = mesh.mesh_dim_names or ()
    if sorted(names) != ["local", "site"]:
        raise ValueError(
            f"mesh= has the dimensions {names!r}; it needs 'site' and 'local' and no others: "
            f"{_REMEDY}"
        )
    return Levels(mesh.get_group("site"), mesh.get_group("local"), device, timeout)


def refuse_method(method: Any) -> None:
    """Raises for a method that needs one level.

    Raises:
        ValueError: names it, with the remedy.
    """
    if isinstance(method, LocalSteps):
        raise ValueError(
            "mesh= with og.LocalSteps: it shares no gradients, also inside a site; use "
            "og.LocalSteps with group= over all ranks, or another method with mesh="
        )
    methods = list(method.methods.values()) if isinstance(method, PerLayer) else [method]
    if any(isinstance(one, EDAD) for one in methods):
        raise ValueError(
            "mesh= with og.EDAD: what sites compute again for each other cannot be pooled inside "
            "a site; use og.DAD() with mesh=, or og.EDAD with group= over all ranks"
        )


def refuse_settings(
    *, weighting: str, max_bad_steps: int | None, buffers: str | None, verify_every: int | None
) -> None:
    """Raises for settings that need one level.

    Raises:
        ValueError: names it, with the remedy.
    """
    if weighting != "sites":
        raise ValueError(
            f"mesh= with weighting={weighting!r}: every rank counts alike; use batches of one size"
        )
    if buffers not in (None, "local"):
        raise ValueError(
            f"mesh= with buffers={buffers!r}: each rank keeps its own; leave it out, and average "
            f"running statistics before a test"
        )
    if max_bad_steps is not None:
        raise ValueError(
            f"mesh= with max_bad_steps={max_bad_steps}: what is not finite goes where it goes "
            f"with DDP; check the gradients before optimizer.step()"
        )
    if verify_every is not None:
        raise ValueError(
            f"mesh= with verify_every={verify_every}: what the ranks of a site hold is not "
            f"compared; leave it out"
        )


def refuse_inspection(inspection: Inspection) -> None:
    """Raises for what the method would do of this model.

    Raises:
        ValueError: names it, with the remedy.
    """
    if inspection.blocks:
        name = inspection.blocks[0].block.name
        raise ValueError(
            f"mesh= with reveal='activations': {name!r} would be computed again by all sites, "
            f"which cannot be pooled inside a site; use og.DAD() with reveal='gradient'"
        )
    if inspection.local or inspection.local_buffers:
        name = next(iter([*inspection.local, *inspection.local_buffers]))
        raise ValueError(
            f"mesh= with og.Local() for {name!r}: the ranks of a site have to share it; give it "
            f"another method, or use group= over the ranks that are to differ"
        )
    late = [name for name, k in inspection.every.items() if k > 1]
    if late:
        raise ValueError(
            f"mesh= with every={inspection.every[late[0]]} for {late[0]!r}: every backward is "
            f"shared in both levels; use session.no_sync() for the backward passes in between"
        )
