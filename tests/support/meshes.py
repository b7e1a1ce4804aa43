"""Meshes of ranks that are threads: a gloo group per site, and one per place in a site."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import outergrad as og
from outergrad.launch.simulate import gloo_group
from outergrad.step.transport_state import on_transport
from ranks import TIMEOUT, _in_threads, raise_first

T = TypeVar("T")


@dataclass(frozen=True)
class ThreadMesh:
    """What `og.distribute` needs of a `DeviceMesh`, without a default process group.

    Attributes:
        site: index of this rank's site.
        local: of this rank in it.
        ranks: per site.
        groups: by dimension.
    """

    site: int
    local: int
    ranks: int
    groups: dict[str, dist.ProcessGroup]
    mesh_dim_names: tuple[str, ...] = ("site", "local")

    @property
    def number(self) -> int:
        """Of this rank among all."""
        return self.site * self.ranks + self.local

    def get_group(self, mesh_dim: str) -> dist.ProcessGroup:
        return self.groups[mesh_dim]


def try_mesh(
    sites: int, ranks: int, body: Callable[[ThreadMesh], T], timeout: timedelta = TIMEOUT
) -> list[T | BaseException]:
    """Runs body on every rank of a new mesh, site by site; an error of a rank is its result."""
    return _in_threads(_makers(sites, ranks, timeout), body_of(body))


def run_mesh(sites: int, ranks: int, body: Callable[[ThreadMesh], T]) -> list[T]:
    """The same on groups that the whole test session shares; raises the first error."""
    meshes = lasting_meshes(sites, ranks)
    results = _in_threads([lambda mesh=mesh: mesh for mesh in meshes], body_of(body))
    used = [on_transport(group) for mesh in meshes for group in mesh.groups.values()]
    unfinished = any(sessions.running or sessions.lost for sessions in used)
    for sessions in used:
        sessions.attached.clear()
    if unfinished or any(isinstance(result, BaseException) for result in results):
        lasting_meshes.cache_clear()
    return raise_first(results)


def body_of(body: Callable[[ThreadMesh], T]) -> Callable[[int, ThreadMesh], T]:
    return lambda _, mesh: body(mesh)


@cache
def lasting_meshes(sites: int, ranks: int) -> tuple[ThreadMesh, ...]:
    return tuple(_in_threads(_makers(sites, ranks, TIMEOUT), lambda _, mesh: mesh))


def _makers(sites: int, ranks: int, timeout: timedelta) -> list[Callable[[], ThreadMesh]]:
    store = dist.HashStore()

    def make(site: int, local: int) -> ThreadMesh:
        between = dist.PrefixStore(f"between {local}", store)
        inside = dist.PrefixStore(f"inside {site}", store)
        groups = {
            "site": gloo_group(between, site, sites, timeout),
            "local": gloo_group(inside, local, ranks, timeout),
        }
        return ThreadMesh(site, local, ranks, groups)

    places = [(site, local) for site in range(sites) for local in range(ranks)]
    return [lambda place=place: make(*place) for place in places]


def of_local_steps(
    model: nn.Module,
    method: og.LocalSteps,
    rows: Tensor,
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    steps: int,
) -> list[list[nn.Module]]:
    """Per step, the models of two sites of two ranks, in float64; exchanges are applied at once.

    Args:
        model: Where all begin.
        method: After how many steps the sites exchange, and how.
        rows: Of each rank, multiplied by the number of the step.
        loss_of: Of a model and rows.
        steps: How many.
    """
    start, k = copy.deepcopy(model).double(), method.k
    outer = method.optimizer(list(start.parameters()))
    sites, found = [copy.deepcopy(start) for _ in range(2)], []
    inner = [torch.optim.SGD(site.parameters(), lr=0.05, momentum=0.9) for site in sites]
    for step in range(steps):
        for s, (site, optimizer) in enumerate(zip(sites, inner, strict=True)):
            optimizer.zero_grad()
            for x in rows[2 * s : 2 * s + 2].double():
                (loss_of(site, (step + 1) * x) / 2).backward()
            optimizer.step()
        if step % k == k - 1:
            with torch.no_grad():
                for p, *own in zip(*(m.parameters() for m in (start, *sites)), strict=True):
                    p.grad = p - (own[0] + own[1]) / 2
                outer.step()
                for site in sites:
                    site.load_state_dict(start.state_dict())
        found.append([copy.deepcopy(site) for site in sites])
    return found
