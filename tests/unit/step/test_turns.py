"""Turns of steps: what is posted for one that is left out meets no message."""

from __future__ import annotations

import copy
import gc
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import outergrad as og
from covering import covering
from outergrad.launch.traffic import loopback_name
from outergrad.step import transport_state
from outergrad.step.transport_state import MessageSequence, on_transport
from patience import distribute_then_hurry
from ranks import run_on_lasting_groups, run_ranks

LIKE, OTHER = ("like",), ("other",)
BATCHES = (4, 4, 4, 4, 6, 4, 4, 4, 4, 4, 4)
"""One step is another than the last ones promised."""


def walk(counter: MessageSequence, lengths: list[object]) -> tuple[list[int], list[int]]:
    """The turns of steps, and those for which receives are posted, in order."""
    taken, posted = [], []
    for length in lengths:
        turn, expected = counter.begin(length)
        taken.append(turn)
        posted += expected
        assert turn in posted, "what comes in a turn is waited for at last when it begins"
    return taken, posted


def test_equal_steps_follow_each_other_and_are_expected_a_step_ahead():
    taken, posted = walk(MessageSequence(), [LIKE] * 5)
    assert taken == [2, 3, 4, 5, 6]
    assert posted == [2, 3, 4, 5, 6, 7]


def test_steps_of_two_kinds_in_turns_are_expected_like_equal_ones():
    """One that is of the same kind again is not what was expected."""
    counter, found = MessageSequence(), []
    for kind, following in [(LIKE, OTHER), (OTHER, LIKE), (LIKE, OTHER), (LIKE, OTHER)]:
        found.append(counter.begin(kind, following))
    assert [turn for turn, _ in found] == [2, 3, 4, 6]
    assert [list(posted) for _, posted in found] == [[2], [3, 4], [5], [6]]


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_posted_twice_and_no_turn_comes_again(seed):
    """Also where a turn was expected for other lengths than it would have."""
    random = torch.Generator().manual_seed(seed)
    lengths = [("kind", k) for k in torch.randint(0, 2, (200,), generator=random).tolist()]
    counter, posted_for = MessageSequence(), {}
    for length in lengths:
        turn, expected = counter.begin(length)
        for one in expected:
            assert one not in posted_for
            posted_for[one] = length
        assert posted_for[turn] == length


def test_what_is_left_waiting_grows_with_the_root_of_the_steps():
    lengths = [LIKE if k % 8 else OTHER for k in range(4000)]
    taken, posted = walk(MessageSequence(), lengths)
    assert len(set(posted) - set(taken)) <= 8 * math.sqrt(len(lengths))


def test_when_turns_run_out_steps_go_without(monkeypatch):
    monkeypatch.setattr(transport_state, "MOST_TURNS", 6)
    counter = MessageSequence()
    assert [counter.begin(LIKE)[0] for _ in range(5)] == [2, 3, 4, 0, 0]


# -- at work --------------------------------------------------------------------------------------


MODEL = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 3))


def train(group: dist.ProcessGroup, batches: tuple[int, ...], method: object) -> list[torch.Tensor]:
    model = copy.deepcopy(MODEL)
    session, found = og.distribute(model, method, group=group), []
    for step, rows in enumerate(batches):
        model.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + group.rank())
        model(torch.randn(rows, 8, generator=generator)).square().mean().backward()
        found += [p.grad.clone() for p in model.parameters()]
    session.detach()
    return [*found, *model.buffers()]


def step(model: nn.Linear, rows: int = 4) -> torch.Tensor:
    """The gradient of the weight with other rows on each site."""
    model.zero_grad()
    model(torch.randn(rows, model.in_features)).square().mean().backward()
    return model.weight.grad.clone()


METHODS = {
    "dad": og.DAD(),
    "rank-dad": og.RankDAD(rank=2),
    "two-way": og.RankDAD(rank=2, reduce="two_way"),
    "sides in turn": og.RankDAD(rank=2, reduce="alternate"),
    "tolerance": og.RankDAD(rank=4, tolerance=0.2),
}


@pytest.mark.parametrize(("method", "sites"), covering(list(METHODS), [2, 3], quick=4, every=2))
def test_gradients_are_those_of_steps_without_turns(method, sites, monkeypatch):
    def body(rank, group):
        return train(group, BATCHES, METHODS[method])

    found = run_on_lasting_groups(sites, body)
    monkeypatch.setattr(transport_state, "MOST_TURNS", 0)
    for ours, plain in zip(found, run_on_lasting_groups(sites, body), strict=True):
        assert all(map(torch.equal, ours, plain))


def test_receives_are_posted_a_step_before():
    """After the first equal steps a message is waited for before its sender's step begins."""

    def body(rank, group):
        model = nn.Linear(32, 32)
        session = og.distribute(model, og.RankDAD(rank=2), group=group)
        ahead = []
        for _ in range(5):
            step(model)
            ahead.append(sum(map(len, session._at.comm._posted.values())))
        session.detach()
        return ahead

    for ahead in run_ranks(2, body):  # where no other test has left out turns
        assert ahead == [0, 1, 1, 1, 1]  # the factors of the next one


def test_a_second_session_meets_nothing_that_waits_for_the_first():
    def body(rank, group):
        torch.manual_seed(rank)
        first, second = nn.Linear(8, 3), nn.Linear(8, 3)
        session = og.distribute(first, og.DAD(), group=group)
        found = [step(first) for _ in range(4)]
        other = og.distribute(second, og.DAD(), group=group)
        found += [step(model) for _ in range(4) for model in (first, second)]
        other.detach()
        found += [step(first) for _ in range(4)]
        session.detach()
        del session, other
        gc.collect()
        third = og.distribute(nn.Linear(8, 3), og.DAD(), group=group)
        third.detach()
        return found

    first, second = run_on_lasting_groups(2, body)
    assert all(map(torch.equal, first, second))


def test_a_loaded_state_meets_nothing_that_waits():
    def body(rank, group):
        model = nn.Linear(8, 3)
        session = og.distribute(model, og.RankDAD(rank=2), group=group)
        saved, found = session.state_dict(), []
        for k in range(12):
            if k == 6:
                session.load_state_dict(saved)
            found.append(step(model, rows=4 + k // 9))
        session.detach()
        return found

    first, second = run_on_lasting_groups(2, body)
    assert all(map(torch.equal, first, second))


def test_a_site_that_counts_otherwise_is_an_error_in_time():
    """As if one had made a step more: no message is taken for another."""

    def body(rank, group):
        model = nn.Linear(8, 3)
        distribute_then_hurry(model, og.DAD(always=True), group=group)
        for k in range(6):
            if k == 4 and rank == 0:
                on_transport(group).turns.begin("another")
            step(model)

    with pytest.raises(og.SiteLostError):
        run_on_lasting_groups(2, body)


# -- the end --------------------------------------------------------------------------------------

ENDS = """
import gc, sys
import torch
import torch.distributed as dist
from outergrad.comm.torch import TorchComm

store, rank = dist.FileStore(sys.argv[1], 2), int(sys.argv[2])
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
comms = []
for group in [dist.new_group() for _ in range(3)]:
    comm = TorchComm(group, torch.device("cpu"))
    comm.take_turn(2)
    for turn in (2, 3):
        comm.expect([1000, 1000], turn)
    comm.all_gather(torch.zeros(1000, dtype=torch.uint8), [1000, 1000]).wait()
    comms.append(comm)
kept, forgotten, destroyed = comms
forgotten.take_turn(5)
dist.destroy_process_group(destroyed.group)
gc.collect()
dist.barrier()
"""


@pytest.mark.slow
def test_processes_end_in_order_while_receives_wait(tmp_path):
    """In one group to the end of Python; in one they are forgotten; one is destroyed."""
    command = [sys.executable, "-c", ENDS, str(tmp_path / "store")]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": loopback_name() or "lo"}
    sites = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
    assert [site.wait(60) for site in sites] == [0, 0]
