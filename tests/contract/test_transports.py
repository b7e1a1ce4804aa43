"""What every transport must do, also one that is no part of outergrad."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from examples.queue_transport import Hub, QueueTransport

from outergrad.comm.mirror import MirrorComm
from outergrad.comm.process_group import TorchDistributed
from outergrad.comm.trace import Tracer
from outergrad.core.errors import ExchangeError, Failure
from outergrad.core.transport import Comm, Letter
from ranks import run_ranks
from stars import comms_on_star

CPU = torch.device("cpu")
VOTES = 2
"""The lane of votes, besides the usual one."""


def on_torch(sites: int, body: Callable[[Comm], Any], timeout_s: float = 20.0) -> list[Any]:
    def opened(rank, group):
        timeout = timedelta(seconds=timeout_s)
        return body(TorchDistributed().open(CPU, group=group, timeout=timeout))

    return run_ranks(sites, opened)


def on_queues(sites: int, body: Callable[[Comm], Any], timeout_s: float = 20.0) -> list[Any]:
    hub = Hub(sites)

    def opened(rank):
        timeout = timedelta(seconds=timeout_s)
        return body(QueueTransport(hub, rank).open(CPU, timeout=timeout))

    with ThreadPoolExecutor(sites) as threads:
        return list(threads.map(opened, range(sites)))


def on_blind_star(sites: int, body: Callable[[Comm], Any], timeout_s: float = 20.0) -> list[Any]:
    return comms_on_star(sites, body, timeout_s, {"blind": True})


RUNS = {
    "torch": on_torch,
    "queues": on_queues,
    "star": comms_on_star,
    "blind star": on_blind_star,
}
IN_UNITS = {on_blind_star}
"""Where all numbers of a sum are rounded to one unit, by its largest number."""


@pytest.fixture(params=RUNS)
def run(request):
    return RUNS[request.param]


@pytest.fixture(params=[1, 2, 3])
def sites(request):
    return request.param


def numbers(rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of a site, unlike those of any other."""
    return (torch.arange(size) * 10 + rank).to(dtype)


def sizes_of(sites: int) -> list[int]:
    """Unequal ones."""
    return [3 + 2 * rank for rank in range(sites)]


# -- the collectives ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_reduce_sums_in_place_to_the_same_bits(run, sites, dtype):
    parts = [torch.randn(5, 7).to(dtype) for _ in range(sites)]

    def body(comm):
        own = parts[comm.rank].clone()
        assert comm.all_reduce(own).wait() is own
        return own

    found = run(sites, body)
    assert all(torch.equal(found[0], other) for other in found)
    expected = sum(part.double() for part in parts)
    rounding = torch.finfo(dtype).eps * sum(part.double().abs() for part in parts)
    if run in IN_UNITS:
        rounding += torch.finfo(dtype).eps / 2 * expected.abs().max()
    assert ((found[0].double() - expected).abs() <= sites * rounding).all()


def test_lines_bring_letters_to_one_site_alone_or_are_refused(run, sites):
    def body(comm):
        others = [site for site in range(sites) if site != comm.rank]
        if not comm.has_lines:
            with pytest.raises(RuntimeError, match="no lines between pairs of sites"):
                comm.exchange_with(others, 1, 100)
            return None
        lines = comm.exchange_with(others, 1, 100)
        for site in others:
            content = torch.tensor([comm.rank, site], dtype=torch.uint8)
            lines.send(site, Letter(7, 0.1, content))
        until = time.monotonic() + 20.0
        letters = {site: lines.next(site, until) for site in others}
        lines.close()
        return {
            site: (one.number, one.share, *one.content.tolist()) for site, one in letters.items()
        }

    for rank, found in enumerate(run(sites, body)):
        if found is not None:
            assert found == {site: (7, 0.1, site, rank) for site in range(sites) if site != rank}
    assert run is not on_torch or found is not None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_all_gather_brings_what_each_site_has_however_long(run, sites, dtype):
    def body(comm):
        own = numbers(comm.rank, sizes_of(sites)[comm.rank], dtype)
        return comm.all_gather(own, sizes_of(sites)).wait()

    for parts in run(sites, body):
        assert len(parts) == sites
        for rank, part in enumerate(parts):
            assert torch.equal(part, numbers(rank, sizes_of(sites)[rank], dtype))


def test_all_to_all_brings_what_each_site_has_for_this_one(run, sites):
    def body(comm):
        parts = [numbers(10 * comm.rank + other, 2 + comm.rank) for other in range(sites)]
        return comm.all_to_all(parts, [2 + rank for rank in range(sites)]).wait()

    for here, parts in enumerate(run(sites, body)):
        for rank, part in enumerate(parts):
            assert torch.equal(part, numbers(10 * rank + here, 2 + rank))


def test_broadcast_overwrites_by_what_the_first_site_has(run, sites):
    def body(comm):
        own = numbers(comm.rank, 6, torch.uint8).view(2, 3)
        comm.broadcast(own)
        return own

    for found in run(sites, body):
        assert torch.equal(found, numbers(0, 6, torch.uint8).view(2, 3))


def test_control_makes_words_that_can_be_sent(run, sites):
    def body(comm):
        own = comm.control([comm.rank, -1, 1 << 62])
        assert own.dtype == torch.int64
        return [part.tolist() for part in comm.all_gather(own, [3] * sites).wait()]

    for found in run(sites, body):
        assert found == [[rank, -1, 1 << 62] for rank in range(sites)]


# -- their order ----------------------------------------------------------------------------------


def test_what_is_started_first_need_not_be_awaited_first(run, sites):
    """Collectives of all kinds under way together; awaited from the last to the first."""

    def body(comm):
        own = [numbers(comm.rank, 4) + 100 * k for k in range(4)]
        works = [
            comm.all_gather(own[0], [4] * sites),
            comm.all_reduce(own[1].clone()),
            comm.all_to_all([own[2]] * sites, [4] * sites),
            comm.all_gather(own[3], [4] * sites),
        ]
        return [work.wait() for work in reversed(works)][::-1]

    for first, summed, second, third in run(sites, body):
        for k, parts in ((0, first), (2, second), (3, third)):
            for rank, part in enumerate(parts):
                assert torch.equal(part, numbers(rank, 4) + 100 * k)
        assert torch.equal(summed, sum(numbers(rank, 4) + 100 for rank in range(sites)))


def test_lanes_are_in_order_of_their_own(run):
    """One site votes before its message, the other after it."""

    def body(comm):
        def send(lane):
            return comm.all_gather(numbers(comm.rank, 2 + lane), [2 + lane] * 2, lane=lane)

        lanes = (0, VOTES) if comm.rank == 0 else (VOTES, 0)
        works = {lane: send(lane) for lane in lanes}
        return {lane: works[lane].wait() for lane in (VOTES, 0)}

    for found in run(2, body):
        for lane, parts in found.items():
            for rank, part in enumerate(parts):
                assert torch.equal(part, numbers(rank, 2 + lane))


def test_what_was_expected_comes_like_anything_else(run, sites):
    def body(comm):
        comm.take_turn(3)
        comm.expect(sizes_of(sites), 3, torch.float32)
        comm.expect([2] * sites, 3, torch.int64, lane=VOTES)
        own = numbers(comm.rank, sizes_of(sites)[comm.rank])
        votes = comm.all_gather(comm.control([comm.rank, 7]), [2] * sites, lane=VOTES)
        return comm.all_gather(own, sizes_of(sites)).wait(), votes.wait()

    for parts, votes in run(sites, body):
        assert [vote.tolist() for vote in votes] == [[rank, 7] for rank in range(sites)]
        for rank, part in enumerate(parts):
            assert torch.equal(part, numbers(rank, sizes_of(sites)[rank]))


# -- what is counted ------------------------------------------------------------------------------


def test_bytes_are_those_of_the_cost_model(run, sites):
    lengths = sizes_of(sites)

    def body(comm):
        rank, cost, told = comm.rank, comm.cost, []
        assert (cost.sites, comm.world_size) == (sites, sites)
        others = sum(lengths) - lengths[rank]
        expected = [
            cost.all_reduce(4 * 35),
            cost.all_gather(8 * lengths[rank], 8 * others),
            cost.all_to_all(4 * lengths[rank] * (sites - 1), 4 * others),
        ]
        parts = [numbers(rank, lengths[rank])] * sites
        for start in (
            lambda: comm.all_reduce(torch.ones(5, 7)),
            lambda: comm.all_gather(numbers(rank, lengths[rank], torch.int64), lengths),
            lambda: comm.all_to_all(parts, lengths),
        ):
            before = comm.sent_bytes, comm.received_bytes
            start().wait()
            told.append((comm.sent_bytes - before[0], comm.received_bytes - before[1]))
        assert told == expected
        before = comm.sent_bytes
        comm.broadcast(torch.ones(3))
        assert comm.sent_bytes == before

    run(sites, body)


def test_a_mirror_counts_and_returns_what_the_first_of_equal_sites_would(run, sites):
    def compressor(comm):
        found = [
            comm.all_reduce(torch.ones(4)).wait(),
            *comm.all_gather(torch.ones(5), [5] * sites).wait(),
            *comm.all_to_all([torch.ones(3)] * sites, [3] * sites).wait(),
        ]
        return found, (comm.sent_bytes, comm.received_bytes), comm.cost

    found, counted, cost = run(sites, compressor)[0]
    mirrored, as_counted, _ = compressor(MirrorComm(sites, Tracer(), cost))
    assert as_counted == counted
    assert all(map(torch.equal, mirrored, found))


# -- sessions on it -------------------------------------------------------------------------------


def test_its_key_can_be_kept_as_long_as_it_lives():
    """By it sessions know of each other, and it must not be kept by that."""
    transport = QueueTransport(Hub(1), 0)
    first, second = transport.open(CPU), transport.open(CPU)
    assert first.key is second.key
    table = weakref.WeakKeyDictionary({first.key: 1})
    assert table[second.key] == 1
    del first, second, transport
    gc.collect()
    assert not table


def test_sessions_of_one_group_have_one_key():
    def body(rank, group):
        first, second = (TorchDistributed().open(CPU, group=group) for _ in range(2))
        assert first.key is second.key
        assert hash(first.key) == hash(second.key)

    run_ranks(2, body)


# -- when a site is lost --------------------------------------------------------------------------


def failed(start):
    began = time.monotonic()
    with pytest.raises(ExchangeError) as caught:
        start().wait()
    return caught.value.kind, caught.value.sites, time.monotonic() - began


@pytest.mark.parametrize("sites", [2, 3])
def test_a_site_that_goes_is_known_at_once(run, sites):
    def body(comm):
        if comm.rank == sites - 1:
            comm.close()
            return None
        return failed(lambda: comm.all_gather(torch.ones(2), [2] * sites))

    for found in run(sites, body)[:-1]:
        kind, lost, seconds = found
        assert (kind, lost) == (Failure.CLOSED, (sites - 1,))
        assert seconds < 10.0


def test_a_site_that_is_silent_is_given_its_time(run):
    def body(comm):
        if comm.rank == 1:
            time.sleep(1.5)
            return None
        assert comm.patience_s == 0.5
        return failed(lambda: comm.all_to_all([torch.ones(2)] * 2, [2, 2]))

    kind, lost, seconds = run(2, body, timeout_s=0.5)[0]
    assert (kind, lost) == (Failure.TIMEOUT, (1,))
    assert 0.4 < seconds < 5.0


def test_who_waits_for_a_sum_hears_of_the_end_too(run):
    def body(comm):
        if comm.rank == 1:
            comm.close()
            return None
        return failed(lambda: comm.all_reduce(torch.ones(2)))

    kind, lost, _ = run(2, body)[0]
    assert (kind, lost) == (Failure.CLOSED, (1,))


def test_sites_that_give_up_leave_each_other_word(run, sites):
    def body(comm):
        return comm.give_up(f"I am {comm.rank}", "final", lambda texts: None not in texts, 10.0)

    for found in run(sites, body):
        assert found == [f"I am {rank}" for rank in range(sites)]


def test_who_leaves_no_word_is_missing_and_gets_the_last_of_the_others(run):
    def body(comm):
        if comm.rank == 1:
            time.sleep(1.0)
            return comm.give_up("late", "", lambda texts: texts[0] == "final", 5.0)
        return comm.give_up("first", "final", lambda texts: None not in texts, 0.3)

    first, second = run(2, body)
    assert first[1] is None
    assert second == ["final", "late"]
