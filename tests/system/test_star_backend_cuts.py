"""Lines that are cut while DDP and FSDP2 train through a hub: nothing starts again or differs."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("grpc", reason="a hub needs grpcio")

from outergrad.launch.processes import run_processes
from stars import NAMES, Proxy, hub, kit_of

SITES = 2
CUTS = int(os.environ.get("OUTERGRAD_CUTS", "24"))
"""Cuts in each training."""
GRACE_S = 30.0


def ddp(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model)


def fsdp(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (SITES,)))


def weights(model: torch.nn.Module) -> torch.Tensor:
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in found])


def member(
    folder: Path, ports: list[int], more: str, wrap: Callable[[Any], Any], least: int, rank: int
) -> tuple[list[float], bytes, int]:
    """Trains so many steps at least, and until the parent says that it is enough.

    Returns the sums of the weights after every 20 steps, the weights in the end, and the steps.
    """
    import outergrad.star.backend as star

    torch.set_num_threads(1)
    address = f"star://{folder}/{NAMES[rank]}.kit?hub=127.0.0.1:{ports[rank]}{more}"
    dist.init_process_group(star.NAME, init_method=address)
    torch.manual_seed(5)
    layers = torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)
    model = wrap(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    generator, found, steps = torch.Generator().manual_seed(rank), [], 0
    while True:
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
            optimizer.step()
        steps += 20
        found.append(weights(model).double().sum().item())
        (folder / f"{rank}.began").touch()
        enough = torch.tensor([float((folder / "enough").exists())])
        dist.all_reduce(enough)
        if enough and steps >= least:
            break
    last = weights(model).numpy().tobytes()
    dist.barrier()
    dist.destroy_process_group()
    return found, last, steps


def cut_often(proxies: list[Proxy], folder: Path, cuts: int, over: threading.Event) -> None:
    """Cuts lines at random, once all sites train, and says then that it is enough."""
    draw = random.Random(3)
    while not over.is_set() and len(list(folder.glob("*.began"))) < SITES:
        over.wait(0.05)
    for _ in range(cuts):
        if over.wait(draw.uniform(0.02, 0.2)):
            return
        proxies[draw.randrange(SITES)].cut()
    (folder / "enough").touch()


def trained(
    folder: Path, more: str, wrap: Callable[[Any], Any], cuts: int, least: int = 0
) -> list[Any]:
    folder.mkdir()
    with hub(SITES, grace_s=GRACE_S) as server:
        proxies = [Proxy(server.port) for _ in range(SITES)]
        for name in NAMES[:SITES]:
            shutil.copy(kit_of(name), folder)
        over = threading.Event()
        cutter = threading.Thread(target=cut_often, args=(proxies, folder, cuts, over))
        cutter.start()
        try:
            ports = [proxy.port for proxy in proxies]
            works = [
                partial(member, folder, ports, more, wrap, least, rank) for rank in range(SITES)
            ]
            return run_processes(works, verbose=True)
        finally:
            over.set()
            cutter.join()
            for proxy in proxies:
                proxy.close()


@pytest.mark.parametrize("more", ["", "&blind=1"], ids=["open", "blind"])
@pytest.mark.parametrize("wrap", [ddp, fsdp])
def test_cuts_change_no_bit(tmp_path, wrap, more):
    """Beside a training of as many steps without cuts."""
    cut, alike = trained(tmp_path / "cut", more, wrap, CUTS)
    assert cut == alike
    assert cut[-1] > 20  # it trained between the first cut and the last
    quiet, _ = trained(tmp_path / "quiet", more, wrap, 0, least=cut[-1])
    assert quiet == cut
