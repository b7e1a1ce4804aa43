"""Merged triplets in pieces: the same gradients to the bit, and as many bytes at any number."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import outergrad as og
from low_rank import backward, batch, decaying, gradients_around_a_void_step, model
from outergrad.comm.cost import RingCost
from outergrad.comm.mirror import MirrorComm
from outergrad.comm.trace import Tracer
from outergrad.core.types import Link, Route, Unit
from outergrad.session.attach import attach
from ranks import run_on_lasting_groups

pytestmark = pytest.mark.usefixtures("large_matrices")

LINK = Link(delay_s=1e-3, bytes_per_s=1e9)


@pytest.fixture
def in_pieces(monkeypatch):
    def chosen(*, always: bool) -> None:
        monkeypatch.setattr("outergrad.planning.packing.relays", lambda *_: always)

    return chosen


def trained(original: nn.Module, method: og.RankDAD, sites: int, steps: int = 4):
    """Per site, the gradients of all steps, and what the last one sent."""

    def body(rank, group):
        replica = copy.deepcopy(original)
        session = og.distribute(replica, method, group=group)
        found = [backward(replica, batch(rank, step, 40)) for step in range(steps)]
        stats = session.stats()
        session.detach()
        return found, stats

    return run_on_lasting_groups(sites, body)


@pytest.mark.parametrize("sites", [2, 3, 4])
@pytest.mark.parametrize(
    "settings",
    [{}, {"wire": og.wire.BF16()}, {"tolerance": 0.3}, {"bucket_bytes": 1}],
    ids=["plain", "bf16", "tolerance", "small buckets"],
)
def test_gradients_are_those_of_whole_messages(in_pieces, sites, settings):
    """To the bit, of every step, with what error feedback sends later."""
    method = og.RankDAD(rank=3, reduce="two_way", **settings)
    found = {}
    for always in (False, True):
        in_pieces(always=always)
        found[always] = trained(model(), method, sites)
    for (whole, _), (pieces, stats) in zip(found[False], found[True], strict=True):
        for one, same in zip(whole, pieces, strict=True):
            assert all(same[name].equal(gradient) for name, gradient in one.items())
        layers = stats.layers.values()
        assert sum(layer.sent_bytes for layer in layers) <= stats.sent_bytes
        assert sum(layer.received_bytes for layer in layers) <= stats.received_bytes


def test_a_discarded_step_has_no_pieces(in_pieces):
    """All sites know from the first round that there are no further ones."""
    in_pieces(always=True)
    method = og.RankDAD(rank=2, reduce="two_way")
    smooth, rough = (gradients_around_a_void_step(method, 3, void=void) for void in (False, True))
    for name in ("0.weight", "3.weight"):
        assert all(site[3][name].equal(smooth[0][3][name]) for site in rough)


def one_layer() -> nn.Module:
    return nn.Linear(2000, 1500, bias=False)


def most_sent(original: nn.Module, sites: int) -> int:
    """Bytes that the busiest site sends in a step, by a mirror, which is the first owner."""
    method = og.RankDAD(rank=4, reduce="two_way", error_feedback=None)
    session = attach(original, method, MirrorComm(sites, Tracer()), LINK)
    for step in range(2):
        backward(original, decaying(8, 2000, step))
    sent_bytes = session.stats().sent_bytes
    session.detach()
    return sent_bytes


def test_the_bytes_of_the_busiest_site_do_not_grow_with_the_sites():
    """Of a single layer, whose owner would send S - 1 times its triplets."""
    torch.manual_seed(0)
    original, triplets_bytes = one_layer(), 4 * 4 * (2000 + 1500)
    few = {sites: most_sent(original, sites) for sites in (2, 3)}
    many = {sites: most_sent(original, sites) for sites in (8, 64, 256)}
    for sites, sent_bytes in few.items():
        assert sent_bytes == pytest.approx((sites - 1) * triplets_bytes, rel=0.05)
    overhead = {sites: sites * 1000 for sites in many}  # of headers and preambles
    for sites, sent_bytes in many.items():
        assert sent_bytes < 2 * triplets_bytes + overhead[sites]


@pytest.mark.slow
def test_sixteen_sites_send_what_a_mirror_says():
    """The mirror is the owner. The others send all of their triplets to it, instead of a share."""
    torch.manual_seed(0)
    original, sites = one_layer(), 16
    method = og.RankDAD(rank=4, reduce="two_way", error_feedback=None)

    def body(rank, group):
        replica = copy.deepcopy(original)
        session = og.distribute(replica, method, group=group)
        gradients = [backward(replica, decaying(8, 2000, step)) for step in range(2)]
        sent_bytes = session.stats().sent_bytes
        session.detach()
        return gradients[-1]["weight"], sent_bytes

    (gradient, of_owner), *others = run_on_lasting_groups(sites, body)
    assert of_owner == most_sent(original, sites)
    for other, sent_bytes in others:
        assert other.equal(gradient)
        assert sent_bytes < 1.05 * of_owner


def test_auto_counts_what_an_owner_receives_and_one_more_delay():
    """It gets the triplets of all others, sends the merged ones once, and a piece of all."""
    slot = og.Slot("0", "0.weight", 1000, 1000)
    unit = Unit((slot,), (slot.weight,), 1_000_000, (slot,))
    compressor, sites = og.RankDAD(rank=4).compressor(), 64
    compressor.settle(RingCost(sites), frozenset())
    delays_s = compressor._seconds([unit], sites, Route.TWO_WAY, Link(1.0, 1e30))
    bytes_s = compressor._seconds([unit], sites, Route.TWO_WAY, Link(0.0, 1.0))
    triplets_bytes = 4 * 4 * 2000
    assert delays_s == pytest.approx(3)
    assert bytes_s == pytest.approx((sites + 1) * triplets_bytes)
