"""A site is stopped for longer than the timeout, and wakes: who is a step apart says so."""

from __future__ import annotations

import copy
import os
import random
import signal
import threading
import time
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import outergrad as og
from cases import mlp
from covering import LONG
from forked import IMPORTED, _Context
from outergrad.commit.deferred_votes import DeferredVotes
from outergrad.commit.watcher import Watcher
from outergrad.launch.simulate import gloo_group
from outergrad.launch.traffic import stay_on_loopback

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
SITES, VICTIM, STEP, TIMEOUT_S = 3, 1, 4, 4.0
METHODS = {
    "dense": og.Dense(),
    "dad": og.DAD(always=True),
    "powersgd": og.PowerSGD(rank=2, min_ratio=1),
}
X = torch.randn(SITES, 4, 6, generator=torch.Generator().manual_seed(0))
torch.manual_seed(3)
MODEL = mlp(6, 16, 16, 5)


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stops_before(owner: Any, name: str, due: list[bool]) -> None:
    """Once, when it is due."""
    call = getattr(owner, name)

    def stopping(*args: Any, **more: Any) -> Any:
        if due:
            due.clear()
            stops()
        return call(*args, **more)

    setattr(owner, name, stopping)


def site(rank: int, folder: Path, method: str, place: str) -> None:
    """What one does: trains until it has lost another, and leaves what it has found."""
    stay_on_loopback()
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), SITES)  # which does not end with a site
    group = gloo_group(store, rank, SITES, timedelta(seconds=20))
    model, due = copy.deepcopy(MODEL), list[bool]()
    session = og.distribute(model, METHODS[method], group=group, timeout=TIMEOUT_S)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if place == "makes":
        stops_before(DeferredVotes, "make", due)
    lost = None
    for step in range(STEP + 6):
        optimizer.zero_grad()
        h = model[0](X[rank] + step)
        if rank == VICTIM and step == STEP:
            due.append(True)
            if place.startswith("backward"):
                h.register_hook(lambda d: stops())
            if place == "backward, unwatched":
                Watcher._look = lambda *_: time.sleep(0.5)  # one that comes too late
            if place.isdigit():
                after_s = random.Random(int(place)).uniform(0.0, 0.02)
                threading.Timer(after_s, stops).start()
        try:
            (model[1:](h) ** 2).mean().backward()
        except og.SiteLostError as error:
            lost = {"certain": error.certain, "may_differ": error.may_differ, "said": str(error)}
            lost |= {"sites": error.sites, "step": error.step}
            break
        optimizer.step()
        time.sleep(0.02 if place.isdigit() else 0.0)
    made = session.stats().step if lost is None else lost["step"]
    weights = [p.detach().clone() for p in model.parameters()]
    torch.save({"made": made, "lost": lost, "weights": weights}, folder / f"new{rank}")
    (folder / f"new{rank}").rename(folder / f"site{rank}")
    session.detach()
    os._exit(0)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def until(found: Any, limit_s: float = 40.0) -> None:
    end = time.monotonic() + limit_s
    while not found():
        assert time.monotonic() < end
        time.sleep(0.02)


def endings(folder: Path, method: str, place: str) -> list[dict[str, Any]]:
    """Of all sites: the victim wakes once the others have raised."""
    set_forkserver_preload(IMPORTED)
    own = (folder, method, place)
    processes = [_Context().Process(target=site, args=(r, *own)) for r in range(SITES)]
    for process in processes:
        process.start()
    victim = processes[VICTIM].pid
    assert victim is not None
    left = [folder / f"site{r}" for r in range(SITES)]
    try:
        until(lambda: left[VICTIM].exists() or is_stopped(victim))
        until(lambda: all(one.exists() for r, one in enumerate(left) if r != VICTIM))
        os.kill(victim, signal.SIGCONT)
        until(left[VICTIM].exists)
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()
    return [torch.load(one, weights_only=False) for one in left]


def said(found: list[dict[str, Any]]) -> list[Any]:
    return [(one["made"], one["lost"]) for one in found]


def check(found: list[dict[str, Any]], *, may_lack_word: bool = False) -> None:
    """Sites that have made as many steps are the same; of others both say that they may differ."""
    for k, one in enumerate(found):
        for j, two in enumerate(found):
            if one["made"] == two["made"]:
                assert all(map(torch.equal, one["weights"], two["weights"])), (k, j)
            else:
                assert abs(one["made"] - two["made"]) == 1
                about, lost = (k, j, said(found)), one["lost"]
                assert j in lost["may_differ"], about
                # While the victim stands still it has left no word of how far it is.
                has_no_word = j == VICTIM and one["made"] > two["made"]
                assert not lost["certain"] or (may_lack_word and has_no_word), about
                assert j in one["lost"]["may_differ"], (k, j, said(found))


PLACES = ["backward", "backward, unwatched", "makes"]
EACH = [
    (method, place)
    for method in METHODS
    for place in PLACES
    if (method, place) != ("powersgd", "makes")  # it waits for votes
]
"""Those without waits for votes stop at the same places: dense and dad take turns with them."""
SAME = {("dense", "backward, unwatched"), ("dense", "makes"), ("dad", "backward")}


@pytest.mark.parametrize(("method", "place"), [one for one in EACH if LONG or one not in SAME])
def test_a_site_that_wakes(method: str, place: str, tmp_path: Path) -> None:
    found = endings(tmp_path, method, place)
    assert all(one["lost"] is not None for one in found)
    check(found)
    for k in range(SITES):
        if k != VICTIM:
            assert found[k]["lost"]["sites"] == (VICTIM,), found[k]
    if place == "backward, unwatched":
        assert len({one["made"] for one in found}) == 1  # it asks before it makes the step alone


@pytest.mark.parametrize("seed", range(6 if LONG else len(METHODS)))
def test_a_site_that_is_stopped_at_any_moment(seed: int, tmp_path: Path) -> None:
    check(endings(tmp_path, list(METHODS)[seed % len(METHODS)], str(seed)), may_lack_word=True)
