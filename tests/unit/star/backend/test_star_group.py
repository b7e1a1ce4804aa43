"""Collectives of a process group around a hub, beside what they are defined to be."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import ReduceOp
from torch.profiler import profile

from outergrad.core.errors import ExchangeError
from stars import group_on, groups_on_star, hub, on_star, star

SITES = 3


@pytest.fixture(params=[{}, {"blind": True}], ids=["open", "blind"])
def settings(request):
    """Of the sites: the hub may read, or must not."""
    return request.param


DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
]


def tensors(dtype, shape=(5, 3)):
    """Of every site, by rank: the same on all."""
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(-5, 6, shape, generator=generator) for _ in range(SITES)]
    if dtype in (torch.bool, torch.uint8):
        drawn = [t.abs() for t in drawn]
    if dtype.is_complex:
        return [torch.complex(t.float(), -t.float()).to(dtype) for t in drawn]
    return [t.to(dtype) for t in drawn]


OPERATIONS = {
    "sum": (ReduceOp.SUM, lambda ts: sum(ts[1:], ts[0])),
    "mean": (ReduceOp.AVG, lambda ts: torch.stack(ts).to(wide(ts[0])).mean(0).to(ts[0].dtype)),
    "min": (ReduceOp.MIN, lambda ts: torch.stack(ts).amin(0)),
    "max": (ReduceOp.MAX, lambda ts: torch.stack(ts).amax(0)),
    "product": (ReduceOp.PRODUCT, lambda ts: ts[0] * ts[1] * ts[2]),
    "and": (ReduceOp.BAND, lambda ts: ts[0] & ts[1] & ts[2]),
    "or": (ReduceOp.BOR, lambda ts: ts[0] | ts[1] | ts[2]),
    "xor": (ReduceOp.BXOR, lambda ts: ts[0] ^ ts[1] ^ ts[2]),
}


def wide(t):
    return torch.complex128 if t.is_complex() else torch.float64


def is_defined(operation, dtype):
    if dtype.is_complex:
        return operation in ("sum", "mean")
    if operation in ("and", "or", "xor"):
        return not dtype.is_floating_point
    return operation != "mean" or dtype.is_floating_point


def test_sums_and_other_reductions_of_every_dtype(settings):
    """And what is not defined is refused before anything is sent."""

    def body(group):
        for dtype in DTYPES:
            for name, (op, reference) in OPERATIONS.items():
                t = tensors(dtype)[group.rank()]
                if not is_defined(name, dtype):
                    with pytest.raises(ValueError, match=r"complex|makes no"):
                        group.allreduce([t], op)
                    continue
                group.allreduce([t], op).wait()
                expected = reference(tensors(dtype))
                assert torch.equal(t, expected), (dtype, name)

    groups_on_star(SITES, body, settings=settings)


def test_a_tensor_is_read_when_the_collective_starts_and_written_when_it_ends(settings):
    """Views that are not contiguous, too; and sums of several tensors at once."""

    def body(group):
        whole = torch.full((4, 6), float(group.rank() + 1))
        view, other = whole[:, ::2], torch.ones(3) * group.rank()
        work = group.allreduce_coalesced([view, other])
        whole.fill_(100.0)
        work.wait()
        assert torch.equal(view, torch.full((4, 3), 6.0))
        assert torch.equal(whole[:, 1::2], torch.full((4, 3), 100.0))
        assert torch.equal(other, torch.full((3,), 3.0))

    groups_on_star(SITES, body, settings=settings)


def root(rank, op=ReduceOp.SUM):
    return SimpleNamespace(rootRank=rank, reduceOp=op)


def test_collectives_of_one_root(settings):
    def body(group):
        rank = group.rank()
        for at in range(SITES):
            t = torch.full((3,), float(rank))
            group.broadcast([t], root(at)).wait()
            assert torch.equal(t, torch.full((3,), float(at)))
            t = torch.full((3,), float(rank + 1))
            group.reduce([t], root(at, ReduceOp.MAX)).wait()
            assert torch.equal(t, torch.full((3,), 3.0 if rank == at else rank + 1.0))
            into = [torch.zeros(2) for _ in range(SITES)] if rank == at else []
            group.gather([into] if into else [], [torch.full((2,), float(rank))], root(at)).wait()
            assert [one.tolist() for one in into] == [[r, r] for r in range(SITES)][: len(into)]
            t, parts = torch.zeros(2), [torch.full((2,), 10.0 * r) for r in range(SITES)]
            group.scatter([t], [parts] if rank == at else [], root(at)).wait()
            assert t.tolist() == [10.0 * rank] * 2

    groups_on_star(SITES, body, settings=settings)


def test_collectives_of_parts(settings):
    def body(group):
        rank, own = group.rank(), torch.arange(2.0) + 10 * group.rank()
        everything = torch.cat([torch.arange(2.0) + 10 * r for r in range(SITES)])
        lists = [torch.zeros(2) for _ in range(SITES)]
        group.allgather([lists], [own]).wait()
        assert torch.equal(torch.cat(lists), everything)
        output = torch.zeros(6)
        group.all_gather_single(output, own).wait()
        assert torch.equal(output, everything)
        output = torch.zeros(2)
        group.reduce_scatter_single(output, everything * (rank + 1)).wait()
        assert torch.equal(output, own * 6)
        group.reduce_scatter([output], [list((everything + rank).split(2))]).wait()
        assert torch.equal(output, own * 3 + 3)
        into = [torch.zeros(1 + rank) for _ in range(SITES)]
        group.alltoall(into, [torch.full((1 + r,), float(rank)) for r in range(SITES)]).wait()
        assert [t.tolist() for t in into] == [[float(r)] * (1 + rank) for r in range(SITES)]
        sizes = [1 + r for r in range(SITES)]
        output = torch.zeros(SITES * (1 + rank))
        whole = torch.full((sum(sizes),), float(rank))
        group.all_to_all_single(output, whole, [1 + rank] * SITES, sizes).wait()
        assert output.tolist() == [float(r) for r in range(SITES) for _ in range(1 + rank)]

    groups_on_star(SITES, body, settings=settings)


def sparse(rank):
    index, values = torch.tensor([[0, rank], [1, 1]]), torch.tensor([1.0, 2.0])
    return torch.sparse_coo_tensor(index, values, (4, 3), check_invariants=True)


def test_sparse_sums(settings):
    """Each site has another number of entries."""

    def body(group):
        t = sparse(group.rank())
        group.allreduce([t]).wait()
        assert torch.equal(t.to_dense(), sum(sparse(rank).to_dense() for rank in range(SITES)))

    groups_on_star(SITES, body, settings=settings)


def test_messages_between_two_sites_match_by_tag_and_order(settings):
    def body(group):
        if group.rank() == 0:
            for tag in (7, 8):
                for k in range(3):
                    group.send([torch.full((2,), float(10 * tag + k))], 1, tag).wait()
        if group.rank() == 1:
            for tag in (8, 7):
                for k in range(3):
                    t = torch.zeros(2)
                    group.recv([t], 0, tag).wait()
                    assert t.tolist() == [10.0 * tag + k] * 2
        group.barrier().wait()

    groups_on_star(SITES, body, settings=settings)


def test_a_message_of_any_site(settings):
    def body(group):
        if group.rank():
            time.sleep(0.3 * (2 - group.rank()))
            group.send([torch.full((1,), float(group.rank()))], 0).wait()
            return []
        found = []
        for _ in range(2):
            t = torch.zeros(1)
            work = group.recv_anysource([t], 0)
            work.wait()
            found.append((work.source_rank(), t.item()))
        return found

    assert groups_on_star(SITES, body, settings=settings)[0] == [(2, 2.0), (1, 1.0)]


def test_nobody_sends_within_the_timeout(settings):
    """A future ends, too, though nothing that its thread could see has happened."""

    def body(group):
        work = group.recv_anysource([torch.zeros(1)], 0)
        with pytest.raises(ExchangeError, match="Timed out waiting 1000ms"):
            work.get_future().wait()
        group.barrier().wait()

    groups_on_star(SITES, body, timeout_s=1.0, settings=settings)


def test_nothing_is_left_of_collectives_that_are_over(settings):
    """Also of those of which a site only sends a part, as every step of FSDP2 has some."""

    def body(group):
        rank, own = group.rank(), torch.ones(6)
        for at in range(SITES):
            group.broadcast([own], root(at)).wait()
            group.reduce([own], root(at)).wait()
            group.gather([[torch.ones(6)] * SITES] if rank == at else [], [own], root(at)).wait()
            parts = [torch.ones(6)] * SITES
            group.scatter([own], [parts] if rank == at else [], root(at)).wait()
        group.reduce_scatter_single(torch.ones(2), own).wait()
        group.allreduce([own]).wait()
        group.send([own], (rank + 1) % SITES).wait()
        group.recv([own], (rank - 1) % SITES).wait()
        group.barrier().wait()
        assert not group._line._arrivals

    groups_on_star(SITES, body, settings=settings)


def test_futures_are_set_without_a_wait_and_may_wait_for_others(settings):
    def body(group):
        t, more = torch.ones(4), torch.ones(2)

        def then(future):
            inner = group.allreduce([more]).get_future()
            inner.wait()
            return future.value()[0] + more.sum()

        after = group.allreduce([t]).get_future().then(then)
        assert after.wait().tolist() == [3.0 + 6.0] * 4
        group.barrier().wait()

    groups_on_star(SITES, body, settings=settings)


def test_groups_of_some_sites_have_an_order_of_their_own(settings):
    """Large sums of two groups, begun in another order on each site, do not wait for each other."""

    def body(_, one):
        whole, pair = group_on(one), None
        if whole.rank() < 2:
            pair = group_on(one, name="pair", ranks=[0, 1])
        large = [torch.full((3 << 20,), float(whole.rank() + 1)) for _ in range(2)]
        if whole.rank() == 0:
            works = [whole.allreduce([large[0]]), pair.allreduce([large[1]])]
            works[1].wait()
            works[0].wait()
        elif pair is not None:
            pair.allreduce([large[1]]).wait()
            whole.allreduce([large[0]]).wait()
        else:
            whole.allreduce([large[0]]).wait()
        assert large[0][-1] == 6.0
        assert pair is None or large[1][-1] == 3.0

    on_star(SITES, body, settings)


def test_a_group_is_split(settings):
    def body(group):
        split = group.split_group([0, 2], group_name="two", group_desc="of three")
        if group.rank() == 1:
            assert split is None
            return
        t = torch.full((2,), float(group.rank()))
        split.allreduce([t]).wait()
        assert t.tolist() == [2.0, 2.0]
        assert (split.size(), split.group_name, split.group_desc) == (2, "two", "of three")

    groups_on_star(SITES, body, settings=settings)


def test_ranks_of_a_group_may_have_another_order(settings):
    def body(_, one):
        group = group_on(one, name="turned", ranks=[2, 0, 1])
        t = torch.full((1,), float(group.rank()))
        into = [torch.zeros(1) for _ in range(SITES)]
        group.allgather([into], [t]).wait()
        assert [one.item() for one in into] == [0.0, 1.0, 2.0]
        return group.rank()

    assert on_star(SITES, body, settings) == [1, 2, 0]


def test_a_group_that_others_have_opened_with_other_members_is_refused():
    with hub(3) as server:
        stars = [star(server, rank) for rank in range(3)]
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(lambda one: one.connected(10.0), stars))
        group_on(stars[0], name="some", ranks=[0, 1])
        with pytest.raises(ExchangeError, match=r"'some' cannot be opened: other .* the ranks 0 1"):
            group_on(stars[1], name="some", ranks=[1, 2])
        for one in stars:
            one.close()


def test_a_site_that_is_late_is_named_within_the_timeout(settings):
    def body(group):
        if group.rank() == 2:
            time.sleep(2.0)
            return None
        began = time.monotonic()
        with pytest.raises(ExchangeError, match=r"from site-c: Timed out waiting 1000ms") as error:
            group.allreduce([torch.ones(3)]).wait()
        assert error.value.sites == (2,)
        with pytest.raises(ExchangeError, match=r"from site-c: Timed out waiting 500ms"):
            group.recv([torch.ones(3)], 2).wait(timedelta(seconds=0.5))
        return time.monotonic() - began

    times = groups_on_star(SITES, body, timeout_s=1.0, settings=settings)
    assert all(1.5 <= took < 3.5 for took in times[:2])


def test_a_site_that_is_gone_is_named_and_others_go_on_without_it(settings):
    """Sums of a group to which it adds nothing end at once; those that it made do not."""

    def body(_, one):
        group = group_on(one)
        t = torch.ones(2)
        group.reduce_scatter([t], [[torch.ones(2)] * SITES]).wait()
        assert t.tolist() == [3.0, 3.0]
        pair = group_on(one, name="left", ranks=[0, 1]) if group.rank() < 2 else None
        if pair is None:
            one.close()
            return 0.0
        began = time.monotonic()
        with pytest.raises(ExchangeError, match="site-c is gone"):
            group.allreduce([torch.ones(3)]).wait()
        with pytest.raises(ExchangeError, match="site-c is gone"):
            group.allreduce([torch.ones(3)]).get_future().wait()
        took = time.monotonic() - began
        t = torch.ones(3)
        pair.allreduce([t]).wait()
        assert t.tolist() == [2.0] * 3
        pair.barrier().wait()
        return took

    assert max(on_star(SITES, body, settings)) < 5.0


def test_sites_that_do_not_agree_on_a_sum_are_told_who_differs(settings):
    """Masked numbers are integers, one more than the floats."""
    differs = "20 bytes of int32" if settings else "16 bytes of float32"

    def body(group):
        t = torch.ones(3 if group.rank() != 1 else 4)
        with pytest.raises(ExchangeError, match=f"site-b sent {differs}, where the others"):
            group.allreduce([t]).wait()

    groups_on_star(SITES, body, settings=settings)


def test_more_than_a_window_and_more_than_a_site_keeps_early(settings):
    """A site that begins late gets what was broadcast before it began."""

    def body(group):
        if group.rank() == 1:
            time.sleep(1.0)
        for _ in range(2):
            t = torch.arange(20 << 20, dtype=torch.float32) * (group.rank() == 0)
            group.broadcast([t], root(0)).wait()
            assert t[-1] == (20 << 20) - 1

    groups_on_star(2, body, settings=settings)


def test_a_group_of_one_site(settings):
    def body(_, one):
        if one.connected(10.0).line.rank:
            return
        group = group_on(one, name="alone", ranks=[0])
        t = torch.ones(3)
        for work in (group.allreduce([t]), group.broadcast([t], root(0)), group.barrier()):
            assert work.wait()
        into = torch.zeros(3)
        group.all_gather_single(into, t).wait()
        group.reduce_scatter_single(into, t).wait()
        assert into.tolist() == [1.0] * 3

    on_star(2, body, settings)


def test_every_collective_shows_in_a_profile_once():
    """Of one site: these are threads, and a process has one profile."""

    def body(group):
        rank, own, parts = group.rank(), torch.ones(3), [torch.zeros(1) for _ in range(SITES)]
        every = [torch.zeros(3) for _ in range(SITES)]
        with profile() if rank == 0 else nullcontext() as found:
            works = [
                group.allreduce([own.clone()]),
                group.allreduce_coalesced([own.clone()]),
                group.reduce([own.clone()], root(0)),
                group.reduce_scatter_single(torch.zeros(1), own),
                group.broadcast([own.clone()], root(0)),
                group.allgather([every], [own]),
                group.all_gather_single(torch.zeros(9), own),
                group.gather([every] if rank == 0 else [], [own], root(0)),
                group.scatter([torch.zeros(1)], [parts] if rank == 0 else [], root(0)),
                group.alltoall([torch.zeros(1) for _ in parts], parts),
                group.all_to_all_single(torch.zeros(3), own, [], []),
                group.send([own], (rank + 1) % SITES),
                group.recv([torch.zeros(3)], (rank - 1) % SITES),
                group.barrier(),
            ]
            for work in works:
                work.wait()
        group.barrier().wait()
        names = [event.name for event in found.events() if event.is_async] if found else []
        return Counter(name.partition(":")[2] for name in names if name.startswith("outergrad:"))

    once = dict.fromkeys(("reduce", "reduce_scatter", "broadcast", "gather", "scatter"), 1)
    twice = dict.fromkeys(("all_reduce", "all_gather", "all_to_all"), 2)
    between = dict.fromkeys(("send", "recv", "barrier"), 1)
    assert groups_on_star(SITES, body)[0] == once | twice | between


def test_an_event_of_a_profile_ends_with_its_result():
    def body(group):
        if group.rank():
            time.sleep(0.5)
            group.allreduce([torch.ones(3)]).wait()
            return 0.0
        with profile() as found:
            group.allreduce([torch.ones(3)]).wait()
            time.sleep(0.2)
        (event,) = (one for one in found.events() if one.name == "outergrad:all_reduce")
        return event.time_range.elapsed_us() / 1e6

    assert groups_on_star(SITES, body)[0] >= 0.3
