"""Messages from every site to every other."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from outergrad.comm.agree import broadcast_all
from outergrad.comm.cost import ADDED_BYTES
from outergrad.comm.torch import TorchComm
from outergrad.core.types import Link
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


@pytest.mark.parametrize("numel", [100, 100_003])
def test_two_sites_add_up_sums_where_the_link_is_far_and_count_the_same(numel):
    """The receive that was posted before is taken, and both have the sum of a ring to the bit."""

    def body(rank, group):
        found = {}
        for name, link in (("near", Link(1e-4, 1e9)), ("far", Link(0.02, 1e9))):
            comm = TorchComm(group, CPU)
            comm.settle_pace(link, 30.0)
            comm.take_turn(1)
            comm.expect_sum(numel, 1, torch.float32)
            generator = torch.Generator().manual_seed(rank)
            t = torch.randn(numel, generator=generator)
            found[name] = comm.all_reduce(t).wait(), comm.sent_bytes, comm.received_bytes
        return found

    for found in run_ranks(2, body):
        (by_ring, *bytes_of_ring), (added, *bytes_added) = found["near"], found["far"]
        assert added.equal(by_ring)
        assert bytes_added == bytes_of_ring == [4 * numel] * 2


def test_how_far_others_are_is_found_while_a_model_is_sent():
    """The same on both sites, though one of them is slow to receive."""

    class Slow(TorchComm):
        def broadcast(self, t):
            time.sleep(0.01 * self.rank)
            super().broadcast(t)

    def body(rank, group):
        found = []
        for kind in (*[TorchComm] * 5, *[Slow] * 5):  # a busy machine may disturb some
            comm = kind(group, CPU)
            broadcast_all(comm, [torch.full((3_000_000,), float(rank))])
            found.append(comm.cost)
        return found

    found, other = run_ranks(2, body)
    assert other == found
    near, far = found[:5], found[5:]
    assert min(one.added_bytes for one in near) < 1e6
    assert max(one.added_bytes for one in far) > 0.01 / 5e-10


@pytest.mark.alone
@pytest.mark.parametrize(("delay_s", "is_far"), [(0.0, False), (0.01, True)])
def test_a_slow_link_is_not_taken_for_a_far_one(delay_s: float, is_far: bool):
    """What the bytes of a message take counts as no delay."""

    class Narrow(TorchComm):
        def broadcast(self, t):
            time.sleep(self.rank * (delay_s + t.nbytes / 1e6))
            super().broadcast(t)

    def body(rank, group):
        found = []
        for _ in range(6):  # a busy machine is slower, never faster
            comm = Narrow(group, CPU)
            broadcast_all(comm, [torch.full((40_000,), float(rank))])
            found.append(comm.cost.added_bytes)
        return min(found)

    assert all((bytes_ > ADDED_BYTES) == is_far for bytes_ in run_ranks(2, body))


def test_long_sums_come_in_parts():
    def body(rank, group):
        comm = TorchComm(group, CPU)
        comm.settle_pace(Link(0.0, 1e5), 0.5)  # parts of 4096 bytes
        t = torch.arange(5000, dtype=torch.float32) * (rank + 1)
        parts = len(comm.pace.parts(t))
        return parts, comm.all_reduce(t).wait()

    for parts, found in run_on_lasting_groups(2, body):
        assert parts > 1
        assert found.equal(torch.arange(5000, dtype=torch.float32) * 3)


def drawn(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * rank + numel)
    exact = torch.complex128 if dtype.is_complex else torch.float64
    return (100 * torch.randn(numel, generator=draw, dtype=exact)).to(dtype)


FAR = Link(0.02, 1e9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("is_expected", [False, True])
@pytest.mark.parametrize("sites", [3, 4, 5])
def test_more_sites_add_up_to_what_a_ring_does(sites, is_expected, dtype):
    """To the bit, of fewer elements than sites, too, and in whatever order sums are awaited.

    The longest have more than two of a ring's segments at each site.
    """
    sizes = [1, 2, 7, 1000, 30_001, 1_700_003 if dtype == torch.float32 else 500_003]

    def body(rank, group):
        comm = TorchComm(group, CPU)
        comm.settle_pace(FAR, 60.0)
        comm.take_turn(5)
        for size in sizes if is_expected else []:
            comm.expect_sum(size, 5, dtype)
        works = [comm.all_reduce(drawn(rank, size, dtype)) for size in sizes]
        works[1].advance()
        sums = [work.wait() for work in works[::-1]][::-1]
        return sums, [ring(rank, group, drawn(rank, size, dtype)) for size in sizes], comm

    for sums, by_ring, comm in run_on_lasting_groups(sites, body):
        assert [comm.sum_rounds(t.nbytes) for t in by_ring] == [2] * len(sizes)
        assert all(map(torch.equal, sums, by_ring))
        sent_bytes = sum(2 * (sites - 1) * t.nbytes // sites for t in by_ring)
        assert comm.sent_bytes == comm.received_bytes == sent_bytes


def test_more_sites_leave_long_sums_to_a_ring_where_the_link_is_near():
    def body(rank, group):
        comm = TorchComm(group, CPU)
        comm.settle_pace(Link(1e-5, 1e9), 60.0)
        long = drawn(rank, ADDED_BYTES // 4 + 1, torch.float32)
        return [comm.sum_rounds(n) for n in (0, ADDED_BYTES, long.nbytes)], comm.all_reduce(long)

    for rounds, work in run_on_lasting_groups(3, body):
        assert rounds == [1, 2, 1]
        assert not hasattr(work, "advance")


def test_sums_of_several_sessions_keep_their_order():
    """Each has a transport of its own on the group, and waits for its own sums first."""

    def body(rank, group):
        one, two = TorchComm(group, CPU), TorchComm(group, CPU)
        sizes = [(one, 7), (two, 23), (one, 16), (two, 5)]
        works = [comm.all_reduce(drawn(rank, size, torch.float32)) for comm, size in sizes]
        works[2].advance()
        found = [works[k].wait() for k in (0, 2, 3, 1)]
        return [(t, ring(rank, group, drawn(rank, len(t), torch.float32))) for t in found]

    for sums in run_on_lasting_groups(3, body):
        assert [len(t) for t, _ in sums] == [7, 16, 5, 23]
        assert all(t.equal(expected) for t, expected in sums)
