"""A session among what torch.distributed.checkpoint saves and loads."""

from __future__ import annotations

import math
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import outergrad as og
from forked import forked_processes
from outergrad.launch.processes import run_processes
from outergrad.launch.traffic import stay_on_loopback
from ranks import run_on_lasting_groups

METHODS = {
    "plain": og.RankDAD(rank=2, min_ratio=1.0),
    "own": og.PerLayer({"0.*": og.Local(), "*": og.RankDAD(rank=2, min_ratio=1.0)}),
    "local steps": og.LocalSteps(3, method=og.RankDAD(rank=2, min_ratio=1.0)),
    "sparse": og.Sparse(density=0.1, always=True),
}


class Run:
    """Training that DCP saves and loads."""

    def __init__(self, name: str):
        torch.manual_seed(0)
        self.name, self.rank = name, dist.get_rank()
        self.model = nn.Sequential(nn.Linear(14, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 10))
        self.session = og.distribute(self.model, METHODS[name])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def dict_for(self, saved: Path | None = None) -> dict:
        """As a user writes it; a momentum that is alike on all sites is DCP's to keep once."""
        if self.name == "plain":
            momentum = {"momentum": [self.buffer(p) for p in self.model.parameters()]}
            session = og.DCPState(self.session, saved)
            return {"model": self.model, "optimizer": momentum, "session": session}
        own = {"model": self.model, "optimizer": self.optimizer}
        return {"session": og.DCPState(self.session, saved, **own)}

    def buffer(self, p: nn.Parameter) -> torch.Tensor:
        state = self.optimizer.state[p]
        return state.setdefault("momentum_buffer", torch.zeros_like(p))

    def losses(self, start: int, stop: int) -> list[float]:
        found = []
        for step in range(start, stop):
            generator = torch.Generator().manual_seed(1000 * step + self.rank)
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(6, 14, generator=generator)).square().mean()
            loss.backward()
            self.optimizer.step()
            found.append(loss.item())
        return found


def site(work, store: str, rank: int, sites: int, *args):
    torch.set_num_threads(1)
    stay_on_loopback()
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=sites, timeout=timeout)
    found = work(*args)
    dist.destroy_process_group()
    return found


def run(work, sites: int, folder: Path, *args) -> list:
    store = (folder / f"store-{sites}").as_uri()
    with forked_processes():
        return run_processes([partial(site, work, store, r, sites, *args) for r in range(sites)])


def saved_and_loaded(folder: Path) -> list[tuple]:
    """Of every method, the losses after a checkpoint, and the same from what it holds."""
    found = []
    for name in METHODS:
        whole = Run(name)
        whole.losses(0, 4)
        dcp.save(whole.dict_for(), checkpoint_id=folder / name)
        expected = whole.losses(4, 8)
        again = Run(name)
        dcp.load(again.dict_for(folder / name), checkpoint_id=folder / name)
        found.append((name, expected, again.losses(4, 8)))
    return found


def loaded(folder: Path) -> list[tuple]:
    """By another number of sites."""
    found = []
    for name in METHODS:
        fresh = Run(name)
        own = fresh.model[0].weight.detach().clone()
        dcp.load(fresh.dict_for(folder / name), checkpoint_id=folder / name)
        kept = fresh.model[0].weight.equal(own)
        step = fresh.session.stats().step
        losses = fresh.losses(4, 7)
        shared = [p.detach().tolist() for p in list(fresh.model.parameters())[2:]]
        found.append((name, kept, step, losses, shared))
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_dcp_goes_on_to_the_bit_and_at_another_number_of_sites(tmp_path):
    for site_found in run(saved_and_loaded, 2, tmp_path, tmp_path):
        for name, expected, found in site_found:
            assert found == expected, name
    first, *others = run(loaded, 3, tmp_path, tmp_path)
    for index, (name, kept, step, losses, shared) in enumerate(first):
        assert not kept
        assert step == (1 if name == "local steps" else 4)
        assert all(map(math.isfinite, losses))
        for other in others:
            *_, theirs = other[index]
            if name != "local steps":  # they are between two exchanges
                assert shared == theirs, name
    assert others[-1][1][1], "a new site keeps its own parameters"


def test_models_that_differ_are_refused():
    def body(rank, group):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        session = og.distribute(model, METHODS["own"], group=group)
        with pytest.raises(ValueError, match=r"pass model= and optimizer= to og\.DCPState"):
            og.DCPState(session)
        assert og.DCPState(session, model=model).state_dict()

    run_on_lasting_groups(2, body)
