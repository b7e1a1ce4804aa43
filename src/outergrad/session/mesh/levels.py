"""Transports of a two-level mesh: between the sites, and between the ranks of one site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from outergrad.comm.agree import agree, broadcast_all
from outergrad.comm.words import words_of_all
from outergrad.core.transport import Comm
from outergrad.session.mesh.ranks import Meeting, Ranks, ranks_named

_REMEDY = (
    "torch.distributed.device_mesh.init_device_mesh(device_type, (sites, devices_per_site), "
    'mesh_dim_names=("site", "local"))'
)


class Mesh(Protocol):
    """Protocol of the parts of a `DeviceMesh` that outergrad uses."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Names of the dimensions."""
        ...

    def get_group(self, mesh_dim: Any = None) -> dist.ProcessGroup:
        """Returns the group of the ranks that differ from this one in this dimension alone."""
        ...


class Levels:
    """The two transports of this rank.

    Args:
        site: to its counterparts, the ranks with the same local rank at the other sites: the slow
            link.
        local: to the other ranks of this site: the fast link.
    """

    def __init__(self, site: Comm, local: Comm) -> None:
        self.site, self.local = site, local

    @property
    def ranks(self) -> int:
        """Number of ranks of all sites."""
        return self.site.world_size * self.local.world_size

    @property
    def number(self) -> int:
        """Number of this rank among those of all sites, counted site by site."""
        return self.site.rank * self.local.world_size + self.local.rank

    def agree(
        self, lines: Sequence[str], error: Exception | None, inside: Sequence[str] = ()
    ) -> int:
        """Compares descriptions as `comm.agree`, first inside the sites, then between them.

        Args:
            lines: this rank's description.
            error: as for `comm.agree`.
            inside: lines that only the ranks of a site must have in common.

        Raises:
            ValueError: on every rank, if two ranks differ or one has an error.
        """
        try:
            with ranks_named(self.local):
                own = f"site {self.site.rank}, local rank"
                agree(self.local, [*lines, *inside], error, who=own)
        except Exception as raised:  # goes on nonetheless: the counterparts wait for this rank
            error = error or raised
        return agree(self.site, lines, error)

    def words_of_all(self, words: Sequence[int], lane: int = 0) -> list[list[int]]:
        """Gathers as many int64 words from every rank as from this one, by their numbers."""
        with ranks_named(self.local):
            inside = words_of_all(self.local, words, lane)
        sites = words_of_all(self.site, [word for own in inside for word in own], lane)
        n = len(words)
        return [all_R[k : k + n] for all_R in sites for k in range(0, len(all_R), n)]

    def broadcast_all(self, tensors: Sequence[Tensor]) -> None:
        """Broadcasts tensors from the first rank to all; between sites each travels once."""
        if self.local.rank == 0:
            broadcast_all(self.site, tensors)
        with ranks_named(self.local):
            broadcast_all(self.local, tensors)

    def meet(self, group: Any) -> Meeting:
        """Sets `mesh` of both transports, by which ranks tell each other when some are lost.

        All ranks have done so once `agree` returns.

        Args:
            group: a process group of this rank.
        """
        meeting, local = Meeting(group), self.local.world_size
        comms, sites = (self.site, self.local), range(self.site.world_size)
        own = range(self.site.rank * local, (self.site.rank + 1) * local)
        counterparts = [site * local + self.local.rank for site in sites]
        everybody = range(len(sites) * local)
        along = ((self.site, counterparts, everybody), (self.local, own, own))
        for comm, numbers, peers in along:
            comm.mesh = Ranks(numbers, self.number, len(sites), local, comms, meeting, peers)
        return meeting


def levels_of(mesh: Mesh, opened: Callable[[dist.ProcessGroup], Comm]) -> Levels:
    """Opens the transports of a mesh, whose dimensions may stand in either order.

    Args:
        mesh: sites of several ranks.
        opened: opens the transport over a group.

    Raises:
        ValueError: the dimensions of the mesh have other names.
    """
    names = mesh.mesh_dim_names or ()
    if sorted(names) != ["local", "site"]:
        raise ValueError(
            f"mesh= has the dimensions {names!r}; it needs 'site' and 'local' and no others: "
            f"{_REMEDY}"
        )
    return Levels(opened(mesh.get_group("site")), opened(mesh.get_group("local")))
