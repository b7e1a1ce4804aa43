"""Sites as threads of one process do what processes do."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import closing
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from covering import LONG
from forked import forked_processes
from outergrad.launch.errors import RecipeError, SiteError
from outergrad.launch.simulate import simulate
from outergrad.launch.start import run_sites
from outergrad_lab.data import load
from outergrad_lab.training.job import Job
from outergrad_lab.training.sites import rank_in
from outergrad_lab.training.training import deal, start

METHODS = (
    *("dense", "dad", "edad", "rank-dad:rank=3", "rank-dad:rank=3:reduce=all_reduce"),
    "rank-dad:rank=3:reduce=alternate",
    *("sparse", "sparse:select=random", "ddp"),
)


def gradients(job, folder, group=None, stop=None) -> None:
    """Three steps; what a site has at their end, in a file of its own."""
    training = start(job, data := load("digits", folder), deal(job, data), group=group)
    for _, (x, y) in zip(range(3), training.batches.epoch(0), strict=False):
        training.optimizer.zero_grad()
        cross_entropy(training.replica.model(x), y).backward()
        training.optimizer.step()
    found = {name: p.grad for name, p in training.replica.model.named_parameters()}
    kept = {"sent_bytes": training.replica.total_sent_bytes(3), "gradients": found}
    torch.save(kept, folder / f"{job.method}-{rank_in(group)}.pt")
    training.close()


def all_gradients(sites, folder, group=None, stop=None) -> None:
    for method in METHODS:
        gradients(Job(data="digits", widths=(32,), method=method, sites=sites), folder, group)


@pytest.mark.slow
@pytest.mark.parametrize("sites", [2, 3] if LONG else [3])
def test_gradients_and_bytes_equal_those_of_processes(sites, tmp_path) -> None:
    (one := tmp_path / "processes").mkdir()
    (other := tmp_path / "threads").mkdir()
    with forked_processes():
        run_sites(partial(all_gradients, sites, one), sites)
    simulate(lambda group, stop: all_gradients(sites, other, group, stop), sites)
    for path in sorted(one.iterdir()):
        expected, found = torch.load(path), torch.load(other / path.name)
        assert found["sent_bytes"] == expected["sent_bytes"], path.name
        for name, gradient in expected["gradients"].items():
            torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-5, atol=1e-8)


def test_results_come_in_the_order_of_sites() -> None:
    def work(group, stop):
        dist.all_reduce(total := torch.tensor(1.0), group=group)
        return group.rank(), total.item()

    assert simulate(work, 3) == [(0, 3.0), (1, 3.0), (2, 3.0)]


def threads_since(before: list[threading.Thread]) -> list[str]:
    """Names of the threads that have begun since: nobody but a simulation begins one here."""
    return [thread.name for thread in threading.enumerate() if thread not in before]


@pytest.mark.parametrize(
    ("raised", "expected", "text"),
    [
        (RecipeError("lower it"), RecipeError, "^lower it$"),
        (KeyError("x"), SiteError, "^site 1: KeyError: 'x'$"),
    ],
)
def test_one_that_fails_ends_those_that_wait_for_it(raised, expected, text) -> None:
    def work(group, stop):
        if group.rank() == 1:
            raise raised
        dist.all_reduce(torch.ones(1), group=group)

    before, began = threading.enumerate(), time.monotonic()
    with pytest.raises(expected, match=text):
        simulate(work, 3)
    assert time.monotonic() - began < 10
    assert threads_since(before) == []


def test_work_is_asked_to_stop() -> None:
    def work(group, stop):
        if group.rank() == 0:
            raise KeyError
        for _ in stop.checked(range(10_000)):
            time.sleep(0.01)
        return "not stopped"

    began = time.monotonic()
    with pytest.raises(SiteError):
        simulate(work, 2)
    assert time.monotonic() - began < 10


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ddp", "dad", "edad", "local-steps:k=2"])
def test_a_site_that_fails_while_it_trains_ends_the_others(method, tmp_path) -> None:
    job = Job(data="digits", widths=(32,), method=method, sites=3, epochs=50)

    def work(group, stop):
        data = load("digits", tmp_path)
        with closing(start(job, data, deal(job, data), group=group)) as training:
            for step, _ in enumerate(stop.checked(training.epoch(0))):
                if step == 3 and group.rank() == 2:
                    raise KeyError("data")

    before, began = threading.enumerate(), time.monotonic()
    with pytest.raises(SiteError, match=r"^site 2: KeyError: 'data'$"):
        simulate(work, 3)
    assert time.monotonic() - began < 30, "not the ten minutes that a message may take"
    assert threads_since(before) == []


def test_forward_passes_of_ddp_in_threads_keep_no_site_that_has_ended() -> None:
    inside, both, alone = threading.Event(), threading.Event(), threading.Event()

    def work(group, stop):
        model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
        if group.rank() == 2:
            with model._inside_ddp_forward():
                inside.set()
                assert both.wait(10)
            alone.set()
            raise KeyError("data")
        if group.rank() == 0:
            assert inside.wait(10)
            with model._inside_ddp_forward():
                both.set()
                assert alone.wait(10)
        assert alone.wait(10)
        model(torch.ones(1, 2)).sum().backward()

    before, began = threading.enumerate(), time.monotonic()
    with pytest.raises(SiteError, match=r"^site 2: KeyError: 'data'$"):
        simulate(work, 3)
    assert time.monotonic() - began < 10
    assert threads_since(before) == []


THREADS = """
import gc, threading, torch
from outergrad.launch.simulate import share_generator

class Cycle:
    def __init__(self):
        self.itself, self.tensor = self, torch.zeros(1000)

def work():
    for _ in range(3000):
        Cycle()
        torch.set_rng_state(torch.get_rng_state())

share_generator()
share_generator()
gc.set_threshold(3)  # the collector runs while a state is read
threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@pytest.mark.slow
def test_threads_read_and_set_the_random_state_while_the_collector_runs() -> None:
    """In a process of its own: where they wait for each other, all of it hangs."""
    subprocess.run([sys.executable, "-c", THREADS], check=True, timeout=60)
