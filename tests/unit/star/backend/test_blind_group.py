"""Process groups around a hub that must not read: what it sees, and how near sums are."""

from __future__ import annotations

import copy
import math
import os
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed import ReduceOp

import outergrad as og
from cases import relative_error
from masked import assert_never_twice, drawn, exactly, is_random, masks_used, most_error
from outergrad.core.errors import ExchangeError
from outergrad.star import run
from outergrad.star.frames import ALL, Kind, Place
from outergrad.star.group_seal import GroupSeal
from outergrad.star.run import Run
from stars import group_on, groups_on_star, hub, on_star, star

SITES, BLIND = 3, {"blind": True}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def root(rank, op=ReduceOp.SUM):
    return SimpleNamespace(rootRank=rank, reduceOp=op)


# -- sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 5e3])
def test_a_sum_is_as_near_as_its_unit_and_the_same_everywhere(dtype, scale):
    """Each sum has a unit of its own, however large the one before was."""
    parts = drawn(SITES, 37, 11, dtype=dtype, scale=scale)

    def body(group):
        total = parts[group.rank()].clone()
        group.allreduce([torch.full((37, 11), 5e4, dtype=dtype)]).wait()
        group.allreduce([total]).wait()
        mean = parts[group.rank()].clone()
        group.allreduce([mean], ReduceOp.AVG).wait()
        return total, mean

    found = groups_on_star(SITES, body, settings=BLIND)
    for total, mean in found:
        assert torch.equal(total, found[0][0])
        assert torch.equal(mean, found[0][1])
        error = (total.double() - exactly(parts)).abs()
        assert (error <= most_error(parts, total)).all()
        limit = most_error(parts, mean) / SITES + torch.finfo(dtype).tiny
        limit += torch.finfo(dtype).eps * mean.double().abs()
        assert ((mean.double() - exactly(parts) / SITES).abs() <= limit).all()


def test_parts_that_one_site_gets_are_as_near():
    parts = drawn(SITES, 6, 5)

    def body(group):
        own, rank = torch.zeros(2, 5), group.rank()
        group.reduce_scatter_single(own, parts[rank].clone()).wait()
        assert (
            (own - exactly(parts)[2 * rank : 2 * rank + 2]).abs() <= most_error(parts, own)
        ).all()

    groups_on_star(SITES, body, settings=BLIND)


def test_what_is_not_finite_comes_out_as_without_masks():
    own = [[1.0, math.inf, math.nan, math.inf], [2.0, 1.0, 1.0, -math.inf], [0.5, 1.0, 2.0, 1.0]]

    def body(group):
        t = torch.tensor(own[group.rank()])
        group.allreduce([t]).wait()
        return t.tolist()

    for found in groups_on_star(SITES, body, settings=BLIND):
        assert found[:2] == [3.5, math.inf]
        assert all(map(math.isnan, found[2:]))


def test_a_number_that_is_not_zero_stays_so():
    def body(group):
        t = torch.tensor([1e30, 1e-30 * group.rank()])
        group.allreduce([t]).wait()
        return t[1].item()

    assert all(groups_on_star(SITES, body, settings=BLIND))


def test_sites_may_wait_for_large_sums_in_any_order_or_not_at_all():
    """Second rounds keep the order of the first ones: else each would fill another's window."""
    size = 3 << 20

    def body(group):
        rank, at = group.rank(), torch.arange(4)
        ts = [torch.full((size,), float(k + rank)) for k in at]
        works = [group.allreduce([t]) for t in ts[:3]]
        works.append(group.reduce([ts[3]], root(0)))
        waits = [[0, 1, 2, 3], [2, 1, 0], [1]][rank]
        for k in waits:
            works[k].wait()
        group.barrier().wait()
        assert all(ts[k][-1] == 3.0 * k + 3 for k in waits)

    groups_on_star(SITES, body, settings=BLIND)


def test_sites_that_sum_and_average_the_same_find_out():
    def body(group):
        with pytest.raises(ExchangeError, match="does not come out"):
            group.allreduce([torch.ones(3)], ReduceOp.AVG if group.rank() else ReduceOp.SUM).wait()

    groups_on_star(2, body, settings=BLIND)


# -- what the hub sees -----------------------------------------------------------------------------


def kept_by_the_hub(monkeypatch, body, settings):
    """Bytes of all messages by lane, kind, number, sender and recipient, and of all sums."""
    kept, take, relay = defaultdict(bytes), Run.take, run.relay

    def keep(of, member, frame):
        about = frame.lane, frame.kind, frame.number, frame.sender, frame.recipient
        kept[about] += bytes(frame.payload)
        take(of, member, frame)

    def keep_sum(frame, *args):
        if frame.kind == Kind.SUM:
            kept[frame.lane, frame.kind, frame.number, ALL, frame.recipient] += frame.payload
        relay(frame, *args)

    monkeypatch.setattr(Run, "take", keep)
    monkeypatch.setattr(run, "relay", keep_sum)
    groups_on_star(SITES, body, settings=settings)
    return kept


SECRET = bytes(range(1, 65)) * 48


def secret_through_all(group):
    """The same bytes by every collective, as numbers that one site has, and others not."""
    rank, everyone = group.rank(), range(SITES)
    own = torch.frombuffer(bytearray(SECRET), dtype=torch.float32)
    numbers, zeros = own.view(torch.int32), torch.zeros(len(SECRET) // 4)
    group.broadcast([own.clone()], root(0)).wait()
    group.allgather([[zeros.clone() for _ in everyone]], [own]).wait()
    group.gather([[zeros.clone() for _ in everyone]] if rank == 0 else [], [own], root(0)).wait()
    group.scatter([zeros.clone()], [[own] * SITES] if rank == 0 else [], root(0)).wait()
    group.alltoall([zeros.clone() for _ in everyone], [own] * SITES).wait()
    group.send([own], (rank + 1) % SITES, 3).wait()
    group.recv([zeros.clone()], (rank - 1) % SITES, 3).wait()
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BXOR):
        group.allreduce([numbers.clone() * (rank == 0)], op).wait()
        group.reduce([numbers.clone() * (rank == 0)], root(1, op)).wait()
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN):
        group.allreduce([own.clone()], op).wait()
    group.reduce_scatter([zeros.clone()], [[own] * SITES]).wait()
    pair = group.split_group([0, 1], group_name="pair")
    if pair is not None:
        pair.allreduce([numbers.clone() * rank]).wait()
        pair.broadcast([own.clone()], root(0)).wait()
    group.barrier().wait()


def secrets_in(kept):
    """Messages with some of the secret's bytes in a row."""
    return [at for at, told in kept.items() if any(SECRET[k : k + 6] in told for k in range(64))]


def test_the_hub_reads_no_collective(monkeypatch):
    kept = kept_by_the_hub(monkeypatch, secret_through_all, BLIND)
    assert len(kept) > 60
    assert not secrets_in(kept)
    long = [np.frombuffer(one, np.uint8) for one in kept.values() if len(one) >= len(SECRET)]
    assert len(long) > 40
    assert all(is_random([one]) for one in long)


def test_otherwise_it_could(monkeypatch):
    kept = kept_by_the_hub(monkeypatch, secret_through_all, {})
    assert {at[1] for at in secrets_in(kept)} == {Kind.SUM, Kind.GATHER, Kind.EACH}


def test_no_mask_is_used_twice(monkeypatch):
    """By the groups of a run and its sessions, which share keys of pairs."""
    used = masks_used(monkeypatch)

    def body(_, one):
        whole = group_on(one)
        pair = group_on(one, name="pair", ranks=[0, 1]) if whole.rank() < 2 else None
        for group in filter(None, (whole, pair, whole)):
            group.allreduce([torch.tensor([1.0, math.inf])]).wait()
            group.allreduce([torch.tensor([1, 2])]).wait()
            group.reduce_scatter([torch.ones(1)], [[torch.ones(1)] * group.size()]).wait()
        comm = one.open(torch.device("cpu"))
        for k in range(3):
            comm.all_reduce(torch.ones(4) * 100.0**k).wait()
        comm.all_reduce(torch.ones(4, dtype=torch.int64)).wait()

    on_star(SITES, body, BLIND)
    assert len(used) == 8
    assert_never_twice(used, 5)


# -- keys ------------------------------------------------------------------------------------------


def seals():
    """Two, which have met."""
    shared = os.urandom(32), os.urandom(32)
    both = [GroupSeal({1 - k: shared[0]}, {1 - k: shared[1]}, k, "ab".__getitem__) for k in (0, 1)]
    for k in (0, 1):
        both[k].learn(1 - k, both[1 - k].key)
    return both


PLACE = Place(Kind.EACH, 8, 5, 2)


@pytest.mark.parametrize("to", [ALL, 1])
def test_a_message_of_another_place_or_changed_is_refused_by_name(to):
    one, other = seals()
    sealed = one.sealed(PLACE, b"numbers", to)
    assert bytes(other.opened(PLACE, 0, memoryview(sealed), to)) == b"numbers"
    assert one.sealed(PLACE, b"numbers", to) != sealed
    changed = sealed[:-1] + bytes([sealed[-1] ^ 1])
    others = [replace(PLACE, **{name: 7}) for name in ("number", "lane", "dtype")]
    for place, payload in [(PLACE, changed), *((place, sealed) for place in others)]:
        with pytest.raises(
            ExchangeError, match="what came from a was not encrypted by it"
        ) as error:
            other.opened(place, 0, memoryview(payload), to)
        assert error.value.sites == (0,)


def test_a_message_that_is_too_long_is_refused():
    class Long(bytes):
        def __len__(self):
            return 1 << 31

    with pytest.raises(ValueError, match="of 2147483648 bytes: with blind=1 a message has at most"):
        seals()[0].sealed(PLACE, Long())


def test_sites_that_differ_in_it_all_say_so():
    def body(rank, one):
        one.blind = rank == 1
        with pytest.raises(ValueError, match="blind=True on site-b alone") as caught:
            group_on(one)
        return str(caught.value)

    first, *others = on_star(SITES, body)
    assert others == [first] * 2


def test_a_site_whose_key_does_not_come_is_named():
    """A group that one of its sites does not open."""
    with hub(2) as server:
        stars = [star(server, rank, **BLIND) for rank in range(2)]

        def body(rank, one):
            one.connected(10.0)
            if rank == 0:
                with pytest.raises(ExchangeError, match="nothing came from site-b: Timed out"):
                    group_on(one, timeout_s=0.5)

        on_star(2, body, BLIND)
        for one in stars:
            one.close()


def test_a_session_over_some_sites_goes_by_their_group():
    """Its collectives are those of the group, which encrypts and masks them."""

    torch.manual_seed(0)
    built = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def trained(group):
        model = copy.deepcopy(built)
        session = og.distribute(model, og.DAD(), group=group)
        for step in range(3):
            model.zero_grad()
            model(torch.ones(2, 6) * (group.rank() + step)).square().mean().backward()
        assert session._at.comm.way == group.way
        session.detach()
        return [p.grad for p in model.parameters()]

    def body(rank, one):
        way = one.connected(10.0).way
        assert way.endswith("cannot read it" if one.blind else "could read what passes through it")
        return trained(group_on(one, ranks=[0, 1])) if rank < 2 else None

    around, theirs = (on_star(SITES, body, settings)[:2] for settings in (BLIND, {}))
    for mine, others in zip(around, theirs, strict=True):
        assert all(relative_error(*pair) < 1e-6 for pair in zip(mine, others, strict=True))
