"""HSDP of four sites: pairs that shard a model, which is replicated between them."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("grpc", reason="a hub needs grpcio")

from group_losses import losses_of
from outergrad.launch.processes import run_processes
from stars import NAMES, hub, kit_of

SITES, STEPS = 4, 6


def losses() -> list[float]:
    """Of a training by a mesh of 2 x 2, whose groups of pairs cross each other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(7)
    layers = torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    model = torch.nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    for one in (model[0], model):
        fully_shard(one, mesh=mesh)
    assert all(len(p.to_local()) * 2 in (16, 4, 2) for p in model.parameters())
    return losses_of(model, STEPS)


def member(folder: Path, port: int, rank: int) -> dict[str, list[float]]:
    import outergrad.star.backend as star

    torch.set_num_threads(1)
    at = f"star://{folder}/{NAMES[rank]}.kit?hub=127.0.0.1:{port}"
    store = {"init_method": (folder / "store").as_uri(), "rank": rank, "world_size": SITES}
    found = {}
    for name, about in {
        "gloo": store,
        star.NAME: {"init_method": at},
        "blind": {"init_method": f"{at}&blind=1"},
    }.items():
        dist.init_process_group("gloo" if name == "gloo" else star.NAME, **about)
        found[name] = losses()
        dist.barrier()
        dist.destroy_process_group()
    return found


def test_shards_inside_pairs_and_replicas_between_them_train_as_over_gloo(tmp_path):
    with hub(SITES) as server:
        for name in NAMES[:SITES]:
            shutil.copy(kit_of(name), tmp_path)
        works = [partial(member, tmp_path, server.port, rank) for rank in range(SITES)]
        sites = run_processes(works, verbose=True)
    for found in sites:
        over_gloo, *others = found.values()
        assert len(set(over_gloo)) == STEPS
        for over_star in others:
            assert over_star == pytest.approx(over_gloo, rel=1e-5)
