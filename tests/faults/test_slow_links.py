"""A timeout is about what arrives: a large message over a slow link is no lost site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
from torch import nn

import outergrad as og
from outergrad.comm.agree import broadcast_all
from outergrad.comm.torch import SEND, TorchComm
from outergrad.comm.work import LEAST_BYTES, Pace, TorchWork, tag_of
from outergrad.core.errors import ExchangeError
from outergrad.launch.links import ShapedLink, what_is_missing
from patience import distribute_then_hurry
from ranks import run_ranks

SLOW = ShapedLink(rate_bit_per_s=64e3)
MISSING = what_is_missing(SLOW, 2)
CPU = torch.device("cpu")

# Two sites whose model is sent for four times as long as the timeout; then the link is cut.
PROGRAM = """
import os, subprocess, sys, time
from datetime import timedelta
import torch, torch.distributed as dist, torch._dynamo
import outergrad as og
from outergrad.launch.links import ShapedLink, places

T = 2.0

def say(*words):
    os.write(1, " ".join(map(str, words)).encode() + b"\\n")  # at once: the other writes there, too

def site(rank, place):
    place.enter()
    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    store = dist.TCPStore("10.77.0.1", 29500, 2, rank == 0, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(130, 130), torch.nn.Linear(130, 4))
    began = time.monotonic()
    session = og.distribute(model, og.Dense(), timeout=T)
    say(rank, "distributed after", time.monotonic() - began)
    for step in range(1):
        model.zero_grad()
        model(torch.ones(2, 130) + rank).square().sum().backward()
        say(rank, "step after", time.monotonic() - began, model[1].weight.grad.sum().item())
    session.detach()
    model = torch.nn.Linear(130, 4)  # which is there sooner
    session = og.distribute(model, og.DAD(always=True), timeout=T)
    if rank == 1:
        subprocess.run(["ip", "link", "set", place.interface, "down"], check=True)
    began = time.monotonic()
    try:
        model(torch.ones(2, 130)).sum().backward()
    except og.SiteLostError as error:
        say(rank, "lost after", time.monotonic() - began, error)

with places(2, ShapedLink(rate_bit_per_s=64e3)) as found:
    children = []
    for rank, place in enumerate(found):
        if (pid := os.fork()) == 0:
            try:
                site(rank, place)
            except BaseException as error:
                say(rank, "raised", repr(error))
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.timeout(300)
def test_sites_on_64_kbit_per_s_are_alive():
    """And a link that is cut is noticed in the timeout and a little."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    out = done.stdout
    assert len(re.findall("step after", out)) == 2, out + done.stderr
    took_s = [float(s) for s in re.findall(r"distributed after ([\d.]+)", out)]
    assert min(took_s) > 3 * 2.0, out
    first, second = re.findall(r"step after \S+ (\S+)", out)
    assert first == second
    lost_s = [float(s) for s in re.findall(r"lost after ([\d.]+)", out)]
    assert len(lost_s) == 2, out
    assert max(lost_s) < 2 * 2.0 + 8.0, out


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("rate", [1e3, 1e5])
def test_messages_in_parts_are_the_same_messages(sites, rate):
    """Parts of 4 kB and of 15 kB; some come out even, some do not."""
    lengths = [1, 5000, LEAST_BYTES, 3 * LEAST_BYTES]

    def body(rank, group):
        comm = TorchComm(group, CPU, timedelta(seconds=10.0))
        comm.pace.settle(rate, 10.0, sites - 1)
        for n in lengths:
            sizes = [n + k for k in range(sites)]
            own = torch.arange(sizes[rank], dtype=torch.float64) + rank
            comm.expect(sizes, 0, torch.float64)
            for k, part in enumerate(comm.all_gather(own, sizes).wait()):
                assert torch.equal(part, torch.arange(sizes[k], dtype=torch.float64) + k)
            parts = [torch.full((sizes[o],), 10 * rank + o) for o in range(sites)]
            found = comm.all_to_all(parts, [sizes[rank]] * sites).wait()
            assert [part.unique().tolist() for part in found] == [
                [10 * o + rank] for o in range(sites)
            ]
        return comm.sent_bytes

    expected = [
        sum(
            (sites - 1) * 8 * (n + r) + 8 * sum(n + o for o in range(sites) if o != r)
            for n in lengths
        )
        for r in range(sites)
    ]
    assert run_ranks(sites, body) == expected


def waited_for(comm, nbytes):
    parts = [torch.empty(nbytes, dtype=torch.uint8)] * 2
    TorchWork(comm._receives(parts, tag_of(0, 0)), lambda: None, comm.pace).wait()


def test_every_part_has_the_timeout_for_itself():
    """Three messages' worth of timeouts go by, and something arrives in each of them."""

    def body(rank, group):
        comm = TorchComm(group, CPU, timedelta(seconds=1.0))
        comm.pace.settle(1.0, 1.0, 1)
        if rank == 0:
            part = torch.ones(LEAST_BYTES, dtype=torch.uint8)
            for _ in range(4):
                time.sleep(0.6)
                comm._started(SEND, part, 1, 0x6F67).wait()
            return 0.0
        began = time.monotonic()
        waited_for(comm, 4 * LEAST_BYTES)
        return time.monotonic() - began

    assert run_ranks(2, body)[1] > 2.0


def test_the_timeout_begins_when_what_was_sent_before_should_have_arrived():
    pace, now = Pace(timedelta(seconds=3.0)), time.monotonic()
    assert pace.left(now).total_seconds() == pytest.approx(3.0, abs=0.5)
    assert pace.sends(10**9) == pytest.approx(now, abs=0.5)  # before a rate is known
    pace.settle(8000.0, 3.0, 1)
    assert pace.sends(16_000) == pytest.approx(now, abs=0.5)
    assert pace.sends(72) == pace.all_sent - 72 / 4000.0 == pytest.approx(now + 4.0, abs=0.5)
    assert pace.left(now + 4.0).total_seconds() == pytest.approx(7.0, abs=0.5)
    assert Pace(None).left(now) is None


def test_what_must_have_arrived_is_waited_for_no_longer():
    """Whoever takes part in a step has all that was sent to it before the last one ended."""
    pace, now = Pace(timedelta(seconds=3.0)), time.monotonic()
    pace.settle(2000.0, 3.0, 1)
    for _ in range(50):  # faster than was measured
        pace.sends(1000)
        pace.confirmed()
    assert pace.all_sent <= now + 1.0 + 0.5
    pace.confirmed()
    assert pace.all_sent <= time.monotonic()
    pace.sends(5000)  # what was sent in this step may be on its way
    pace.confirmed()
    assert pace.all_sent == pytest.approx(time.monotonic() + 5.0, abs=0.5)


@pytest.mark.parametrize("method", [og.Auto(), og.Dense(), og.DAD()], ids=repr)
@pytest.mark.parametrize("steps", [0, 30])
def test_a_hang_is_noticed_in_time_where_the_link_seemed_slow(monkeypatch, method, steps):
    """A small model tells of delays alone: what is sent besides must not count at its rate."""
    settle = Pace.settle
    monkeypatch.setattr(Pace, "settle", lambda pace, rate, *more: settle(pace, 2e4, *more))

    def body(rank, group):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 10))
        distribute_then_hurry(model, method, group=group, patience_s=0.7)
        x = torch.randn(8, 20)
        for _ in range(steps):
            model.zero_grad()
            model(x).square().mean().backward()
        if rank == 1:
            time.sleep(6.0)
        began = time.monotonic()
        with pytest.raises(og.SiteLostError):
            model(x).square().mean().backward()
        return time.monotonic() - began

    assert run_ranks(2, body)[0] < 0.7 + 2.0 + 1.0


def test_the_pieces_of_a_broadcast_are_cut_alike_and_the_shortest_timeout_counts():
    """Sites may differ in their timeouts: what they send each other must not."""
    torch.manual_seed(0)
    tensors = [torch.randn(300, 400), torch.randn(7).double(), torch.arange(3)]

    def body(rank, group):
        own = [t.clone() if rank == 0 else torch.zeros_like(t) for t in tensors]
        comm = TorchComm(group, CPU, timedelta(seconds=[20.0, 5.0, 10.0][rank]))
        broadcast_all(comm, own)
        assert all(map(torch.equal, own, tensors))
        return comm.pace._part_bytes

    parts = run_ranks(3, body)
    assert len(set(parts)) == 1


def test_a_site_that_stops_in_a_large_message_is_lost():
    """After its first part: the rest is not waited for any longer than for a small message."""

    def body(rank, group):
        comm = TorchComm(group, CPU, timedelta(seconds=0.7))
        comm.pace.settle(1e4, 0.7, 1)
        if rank == 0:
            part = torch.ones(LEAST_BYTES, dtype=torch.uint8)
            comm._started(SEND, part, 1, 0x6F67).wait()
            time.sleep(2.5)
            return 0.0
        began = time.monotonic()
        with pytest.raises(ExchangeError, match="no answer in time"):
            waited_for(comm, 100 * LEAST_BYTES)
        return time.monotonic() - began

    assert run_ranks(2, body)[1] < 0.7 + 1.5
