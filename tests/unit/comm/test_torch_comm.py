"""Messages from every site to every other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from outergrad.comm.torch import TorchComm
from ranks import run_on_lasting_groups, run_ranks

CPU = torch.device("cpu")


def part(sender: int, receiver: int) -> torch.Tensor:
    """Another length and content for every pair."""
    return torch.arange(1 + 3 * sender + receiver, dtype=torch.int32) + 100 * sender


@pytest.mark.parametrize("sites", [1, 2, 3, 4])
def test_every_site_gets_what_is_for_it(sites):
    def body(rank, group):
        comm = TorchComm(group, CPU)
        parts = [part(rank, receiver) for receiver in range(sites)]
        works = [comm.all_to_all(parts, [len(part(s, rank)) for s in range(sites)])]
        works.append(comm.all_gather(parts[0], [len(part(s, 0)) for s in range(sites)]))
        return [work.wait() for work in works], comm.sent_bytes

    for rank, ((to_me, to_all), sent_bytes) in enumerate(run_on_lasting_groups(sites, body)):
        for sender in range(sites):
            assert to_me[sender].equal(part(sender, rank))
            assert to_all[sender].equal(part(sender, 0))
        others = [part(rank, receiver).nbytes for receiver in range(sites) if receiver != rank]
        assert sent_bytes == sum(others) + (sites - 1) * part(rank, 0).nbytes


def ring(rank: int, group, t: torch.Tensor) -> torch.Tensor:
    """What gloo sums itself."""
    dist.all_reduce(t, group=group)
    return t


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("is_expected", [False, True])
def test_two_sites_add_up_to_what_a_ring_does(dtype, is_expected):
    def body(rank, group):
        comm = TorchComm(group, CPU)
        torch.manual_seed(rank)
        t = (100 * torch.randn(7, 3)).to(dtype)
        comm.take_turn(5)
        if is_expected:
            comm.expect_sum(t.numel(), 5, dtype)
        works = [comm.all_reduce(part) for part in (t.clone(), 2 * t)]
        return [work.wait() for work in works], ring(rank, group, t.clone()), comm.sent_bytes

    for (found, double), expected, sent_bytes in run_ranks(2, body):
        assert found.equal(expected)
        assert double.equal(2 * expected)
        assert sent_bytes == 2 * expected.nbytes


def test_sums_are_the_same_to_the_bit_where_neither_is_a_number():
    def body(rank, group):
        words = torch.tensor([0x7FC00001 + rank, 0x7FC00011 - rank], dtype=torch.int32)
        return TorchComm(group, CPU).all_reduce(words.view(torch.float32)).wait().view(torch.int32)

    first, second = run_on_lasting_groups(2, body)
    assert first.equal(second)


def test_long_sums_come_in_parts():
    def body(rank, group):
        comm = TorchComm(group, CPU)
        comm.settle_pace(1e5, 0.5)  # parts of 4096 bytes
        t = torch.arange(5000, dtype=torch.float32) * (rank + 1)
        parts = len(comm.pace.parts(t))
        return parts, comm.all_reduce(t).wait()

    for parts, found in run_on_lasting_groups(2, body):
        assert parts > 1
        assert found.equal(torch.arange(5000, dtype=torch.float32) * 3)
