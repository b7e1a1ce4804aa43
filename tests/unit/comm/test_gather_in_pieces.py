"""Messages that are gathered in pieces arrive as if each had gone to all sites."""

from __future__ import annotations

import pytest
import torch

from outergrad.comm.cost import RingCost, StarCost, relays
from outergrad.comm.mirror import MirrorComm
from outergrad.comm.relay import piece_lengths
from outergrad.comm.torch import TorchComm
from outergrad.comm.trace import Started, Tracer
from ranks import run_on_lasting_groups

CPU = torch.device("cpu")
LONG = 1001


def sizes_of(sites: int) -> list[int]:
    """A long message, and some shorter than the number of sites."""
    return [LONG, 1, *range(2, sites)][:sites]


def drawn(rank: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(256, (size,), generator=generator).to(torch.uint8)


@pytest.mark.parametrize("is_expected", [False, True])
@pytest.mark.parametrize("sites", [1, 2, 3, 5])
def test_pieces_arrive_as_the_whole(sites, is_expected):
    """Of two gathers under way at once, in whatever order they are awaited."""
    sizes = sizes_of(sites)

    def body(rank, group):
        comm = TorchComm(group, CPU)
        comm.take_turn(5)
        for _ in range(2 * is_expected):
            comm.expect_in_pieces(sizes, 5, lane=5)
        own = drawn(rank, sizes[rank])
        works = [comm.all_gather_in_pieces(t, sizes, lane=5) for t in (own, 255 - own)]
        for work in works:
            work.advance()
        return [work.wait() for work in works[::-1]][::-1]

    whole = [drawn(rank, size) for rank, size in enumerate(sizes)]
    for first, second in run_on_lasting_groups(sites, body):
        assert all(map(torch.equal, first, whole))
        assert all(t.equal(255 - expected) for t, expected in zip(second, whole, strict=True))


@pytest.mark.parametrize("sites", [2, 3, 4])
def test_no_site_sends_a_long_message_often_and_a_mirror_counts_alike(sites):
    sizes = sizes_of(sites)

    def exchanged(comm):
        comm.all_gather_in_pieces(drawn(comm.rank, sizes[comm.rank]), sizes).wait()
        return comm.sent_bytes, comm.received_bytes

    tracer = Tracer()
    real = run_on_lasting_groups(sites, lambda _, group: exchanged(TorchComm(group, CPU)))
    assert exchanged(MirrorComm(sites, tracer)) == real[0]
    started = [event for event in tracer.end().events if isinstance(event, Started)]
    assert sum(message.total.sent for message in started) == sum(sent for sent, _ in real)
    lengths = piece_lengths(sizes)
    most = (sites - 1) * (lengths[0] + sum(lengths))
    assert real[0][0] == most < 2 * (sum(sizes) + sites * sites)


EVEN, UNEVEN = (1e6, 64e6), (32e6, 64e6)
PAYS = {
    "shares are equal": (RingCost(64), *EVEN, False),
    "one has half": (RingCost(64), *UNEVEN, True),
    "one has all, of few bytes": (RingCost(64), 1e3, 1e3, False),
    "one has all, of few sites": (RingCost(5), 1e6, 1e6, False),
    "one has all, of more": (RingCost(6), 1e6, 1e6, True),
    "a hub": (StarCost(64), *UNEVEN, False),
    "nothing": (RingCost(64), 0.0, 0.0, False),
}


@pytest.mark.parametrize(("cost", "largest", "whole", "pays"), PAYS.values(), ids=PAYS)
def test_pieces_are_for_uneven_shares_among_many_sites(cost, largest, whole, pays):
    assert relays(cost, largest, whole) is pays
