"""What collectives cost, against bytes that are counted by hand, message by message."""

from __future__ import annotations

from dataclasses import replace

import pytest

import outergrad as og
from outergrad.comm.cost import ADDED_BYTES, RingCost, StarCost, adds_up, cost_of, seconds
from outergrad.core.transport import Capability
from outergrad.core.types import Link, Route, Slot, Unit

SLOT = Slot("fc", "fc.weight", 40, 60, "fc.bias")
UNIT = Unit((SLOT,), ("fc.weight", "fc.bias"), 40 * 60 + 40, (SLOT,))

SUMS = {
    # a ring of 3 adds up 100 bytes in thirds: 2 on the way to the sum, 2 to hand it on
    "ring": [(RingCost(3), 300, 400), (RingCost(2), 100, 100), (RingCost(4), 100, 150)],
    # to the hub, and the sum back
    "star": [(StarCost(3), 300, 300), (StarCost(2), 100, 100), (StarCost(4), 100, 100)],
    "alone": [(RingCost(1), 100, 0), (StarCost(1), 100, 0)],
}


@pytest.mark.parametrize("case", SUMS)
def test_a_sum(case):
    for cost, nbytes, one_way in SUMS[case]:
        assert cost.all_reduce(nbytes) == (one_way, one_way)


def test_what_each_site_has_for_all():
    """Site 0 has 10 bytes, sites 1 and 2 have 20 and 30: all have 60 in the end."""
    assert RingCost(3).all_gather(own=10, others=50) == (10 + 10, 20 + 30)
    assert StarCost(3).all_gather(own=10, others=50) == (10, 20 + 30)
    assert RingCost(1).all_gather(10, 0) == StarCost(1).all_gather(10, 0) == (0, 0)


def test_what_each_site_has_for_each():
    """Site 0 has 1 and 2 bytes for the others, which have 30 and 40 for it."""
    for cost in (RingCost(3), StarCost(3)):
        assert cost.all_to_all(own=1 + 2, others=30 + 40) == (3, 70)


def busier(cost, nbytes, way):
    """Of the bytes that a site sends and receives of so many on each site, in all rounds."""
    sites = cost.sites
    if way == Route.GATHER:
        rounds = [cost.all_gather(nbytes, (sites - 1) * nbytes)]
    elif way == Route.TWO_WAY:  # each owns the same part
        part = nbytes // sites
        to_owners = cost.all_to_all((sites - 1) * part, (sites - 1) * part)
        rounds = [to_owners, cost.all_gather(part, (sites - 1) * part)]
    else:
        rounds = [cost.all_reduce(nbytes)]
    return max(sum(one.sent for one in rounds), sum(one.received for one in rounds))


@pytest.mark.parametrize("kind", [RingCost, StarCost])
@pytest.mark.parametrize("way", Route)
@pytest.mark.parametrize("sites", [2, 3, 5])
def test_a_share_is_what_would_be_gathered_for_as_many_bytes(kind, way, sites):
    cost, nbytes = kind(sites), 60 * 8
    gathered = cost.share(nbytes, way)
    assert (sites - 1) * gathered == pytest.approx(busier(cost, nbytes, way), rel=1e-12)


@pytest.mark.parametrize("sites", range(2, 9))
def test_shares_of_a_ring_are_what_they_were_to_the_bit(sites):
    for nbytes in range(1, 5000):
        for way in (Route.DENSE, Route.REDUCE, Route.TWO_WAY):
            assert RingCost(sites).share(nbytes, way) == 2 * nbytes / sites


def test_two_sites_add_up_what_would_wait_for_the_link_in_a_ring():
    """As long as that costs less where the link is far, whatever it carries."""
    near, ring = Link(delay_s=1e-3, bytes_per_s=1e8), RingCost(2)
    assert not adds_up(ring, 1 << 18)
    assert adds_up(ring, 1 << 17)
    for bytes_per_s in (1e5, 1e6, 1e8):
        far = Link(delay_s=0.02, bytes_per_s=bytes_per_s)
        assert ring.over(replace(near, bytes_per_s=bytes_per_s)) == ring
        assert adds_up(ring.over(far), 40_000_000)
        assert not adds_up(ring.over(far), 50_000_000)


@pytest.mark.parametrize("sites", [3, 4, 9])
def test_more_sites_add_up_what_waits_in_a_ring_longer_than_its_bytes_would(sites):
    """Two rounds leave the link idle for a part of the time of a sum's bytes; a ring does not."""
    ring = RingCost(sites)
    assert ring.over(Link(delay_s=1e-3, bytes_per_s=1e6)) == ring
    for delay_s in (0.005, 0.02, 0.1):
        for bytes_per_s in (1e6, 1e7, 1e9):
            longest = ring.over(Link(delay_s, bytes_per_s)).added_bytes
            idle_s = 0.15 * ring.all_reduce(int(longest)).sent / bytes_per_s + 1e-9 * longest
            saved_s = 2 * (sites - 2) * delay_s
            assert longest == ADDED_BYTES or idle_s == pytest.approx(saved_s, rel=1e-3)


def test_more_sites_leave_a_long_model_to_a_ring_as_a_whole():
    """A ring loses much beside sums in pieces; two sites send whole sums, in any order."""
    far = Link(delay_s=0.02, bytes_per_s=1e7)
    longest = RingCost(4).over(far).added_bytes
    assert RingCost(4).over(far, longest).added_bytes == longest > 2_000_000
    assert RingCost(4).over(far, longest + 1).added_bytes == ADDED_BYTES
    assert RingCost(2).over(far, 1e12) == RingCost(2).over(far)


@pytest.mark.parametrize("sites", [2, 3, 4, 9])
def test_sketches_wait_for_their_rounds_however_many_sites_there_are(sites):
    """For two of each sum in a group; a hub adds up in one."""
    link = Link(delay_s=0.1, bytes_per_s=1000.0)
    found = [seconds(RingCost(sites), way, 500, link) for way in (Route.GATHER, Route.REDUCE)]
    assert found == pytest.approx([0.6, 0.4 + 0.5])
    assert seconds(StarCost(4), Route.REDUCE, 500, link) == pytest.approx(0.2 + 0.5)


@pytest.mark.parametrize("sites", [2, 3, 5])
def test_a_method_goes_by_the_transport_that_it_is_told_of(sites):
    """In a star the sum costs one gradient, not two: factors pay for fewer rows."""
    told, untold = og.DAD().compressor(), og.DAD().compressor()
    told.settle(StarCost(sites), frozenset(Capability))
    dense, biases = 4 * UNIT.dense_numel, 4 * 40
    limit = (dense / (sites - 1) - biases) / (4 * (40 + 60))
    assert told.break_even(UNIT, sites) == pytest.approx(limit)
    assert cost_of(untold, sites) == RingCost(sites)
    assert untold.break_even(UNIT, sites) == (2 * dense / sites - biases) / (4 * (40 + 60))


@pytest.mark.parametrize("sites", [3, 5])
def test_low_rank_in_a_star_is_summed_where_that_is_fewer_bytes(sites):
    """Sums do not grow with the sites there, which pays on a slow link of short delays."""
    compressor = og.RankDAD(rank=4).compressor()
    compressor.settle(StarCost(sites), frozenset(Capability))
    compressor.settle_reduce([UNIT], sites, Link(1e-9, 1e3))
    assert compressor.auto_way.way == Route.REDUCE
