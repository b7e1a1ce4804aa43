"""Sites that begin a group at an address: one is lost, and comes back by the same script."""

from __future__ import annotations

import os
import shutil
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("grpc", reason="a hub needs grpcio")

import outergrad as og
from outergrad.core.errors import ExchangeError
from outergrad.launch.processes import run_processes
from stars import NAMES, hub, kit_of

SITES, LOST_IN, STEPS = 3, 10, 60


def member(folder: Path, port: int, settings: str, rank: int, again: bool) -> tuple[int, float]:
    """A site's script; returns from which step on it took part, and the sum of its weights."""
    import outergrad.star.backend as star

    if again:
        while not (folder / "lost").exists():
            time.sleep(0.05)
    torch.set_num_threads(1)
    about = f"hub=127.0.0.1:{port}&when_lost=go+on&min_sites=2{settings}"
    dist.init_process_group(star.NAME, init_method=f"star://{folder}/{NAMES[rank]}.kit?{about}")
    assert (dist.get_rank(), dist.get_world_size()) == (rank, SITES)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    session = og.distribute(model, og.DAD(), timeout=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    began = session.stats().step
    while (step := session.stats().step) < STEPS or not (folder / "back").exists():
        assert step < 100 * STEPS
        optimizer.zero_grad()
        if rank == SITES - 1 and step == LOST_IN and not again:
            (folder / "lost").touch()
            os._exit(0)  # as if it were killed
        try:
            model(torch.ones(4, 6) * (rank + step)).square().mean().backward()
        except og.SitesChangedError:
            continue
        optimizer.step()
        time.sleep(0.01)
        if again and step > began + 10:
            (folder / "back").touch()
    session.detach()
    for call in (dist.barrier, partial(dist.all_reduce, torch.ones(2))):
        with pytest.raises(ExchangeError, match="Sessions of og"):
            call()
    return began, sum(p.double().sum().item() for p in model.parameters())


@pytest.mark.parametrize("settings", ["", "&blind=1"], ids=["open", "blind"])
def test_a_site_is_lost_and_comes_back_by_the_same_script(tmp_path, settings):
    with hub(SITES, grace_s=0.5) as server:
        for name in NAMES[:SITES]:
            shutil.copy(kit_of(name), tmp_path)
        about = (tmp_path, server.port, settings)
        lost = get_context("spawn").Process(target=member, args=(*about, SITES - 1, False))
        lost.start()
        works = [partial(member, *about, rank, rank == SITES - 1) for rank in range(SITES)]
        first, second, back = run_processes(works, verbose=True)
        lost.join()
    assert first == second == (0, back[1])
    assert back[0] >= LOST_IN
