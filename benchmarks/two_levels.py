r"""Bytes that one site sends to the others per step: of one rank, and of several in a mesh.

    python benchmarks/two_levels.py --sites 2 --ranks 4 --rows 32

The ranks are threads of this process, over real process groups; bytes are what sessions count in
a step without headers.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import outergrad as og
from outergrad.launch.simulate import Stop, gloo_group, simulate

METHODS = {
    "`og.Dense()`": og.Dense(),
    "`og.DAD()`": og.DAD(),
    "`og.RankDAD(rank=4)`": og.RankDAD(rank=4),
    "`og.PowerSGD(rank=4)`": og.PowerSGD(rank=4),
}
STEPS = 5


@dataclass(frozen=True)
class Mesh:
    """The two groups of a rank."""

    site: dist.ProcessGroup
    local: dist.ProcessGroup
    mesh_dim_names: tuple[str, ...] = ("site", "local")

    def get_group(self, mesh_dim: str) -> dist.ProcessGroup:
        """One of them."""
        return getattr(self, mesh_dim)


def bytes_sent(model: nn.Module, method: og.Dense, rows: int, **where: object) -> int:
    """Per step, once the steps are alike."""
    model = copy.deepcopy(model)
    session = og.distribute(model, method, **where)
    x = torch.linspace(-1, 1, rows * 784).view(rows, 784).sin()
    for _ in range(STEPS):
        model.zero_grad()
        model(x).square().mean().backward()
    session.detach()
    return session.stats().sent_bytes


def main() -> None:
    """A table with a line per method."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4, help="of each site")
    parser.add_argument("--rows", type=int, default=32, help="of each rank")
    options = parser.parse_args()
    sites, ranks, rows = options.sites, options.ranks, options.rows
    model = nn.Sequential(
        *(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    )
    print("| method | one rank per site, all its rows | `mesh=` |")
    print("|---|---|---|")
    for label, method in METHODS.items():
        store = dist.HashStore()

        def on_mesh(
            group: dist.ProcessGroup, _: Stop, method: og.Dense = method, store: dist.Store = store
        ) -> int:
            site, local = divmod(group.rank(), ranks)
            between = gloo_group(dist.PrefixStore(f"between {local}", store), site, sites)
            inside = gloo_group(dist.PrefixStore(f"inside {site}", store), local, ranks)
            return bytes_sent(model, method, rows, mesh=Mesh(between, inside))

        def on_group(group: dist.ProcessGroup, _: Stop, method: og.Dense = method) -> int:
            return bytes_sent(model, method, ranks * rows, group=group)

        alone = simulate(on_group, sites)[0]
        mesh = sum(simulate(on_mesh, sites * ranks)[:ranks])
        cells = (f"{n / 1e6:,.3f} MB" for n in (alone, mesh))
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
