"""Two ends of an edge: what both keep, what their exchanges keep, and that they agree."""

from __future__ import annotations

import pytest
import torch

import outergrad as og
from outergrad.gossip import Choco, LowRank, PowerGossip, RandomK, Whole
from outergrad.gossip.ends import Weights

SHAPES = [(7, 5), (5,), (3, 4, 2, 2), (), (1, 6), (0, 3)]
METHODS = {
    "whole": Whole(),
    "choco, largest": Choco(reduce=og.wire.TopK(0.2), gamma=0.3),
    "choco, random": Choco(reduce=RandomK(0.3), gamma=0.3),
    "choco, signs": Choco(reduce=og.wire.Sign(), gamma=0.3),
    "choco, low rank": Choco(reduce=LowRank(1), gamma=0.3),
    "power": PowerGossip(),
    "power, rank 3": PowerGossip(rank=3),
    "power, cold": PowerGossip(warm=False),
}


def drawn(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES
    ]


class Edge:
    """Two sites that exchange with each other alone, each with a weight of a half."""

    def __init__(self, method, dtype=torch.float64, start=0):
        begin = drawn(start, dtype)
        self.method = method
        self.ends = [method.end(begin, 2, 5, is_first=first) for first in (True, False)]
        self.sites = [drawn(seed, dtype) for seed in (1, 2)]

    def round(self):
        said = [end.say(Weights(x)) for end, x in zip(self.ends, self.sites, strict=True)]
        heard = [self.ends[0].hear(said[0], said[1]), self.ends[1].hear(said[1], said[0])]
        for x, difference in zip(self.sites, heard, strict=True):
            for t, d in zip(x, difference, strict=True):
                t.add_(d, alpha=0.5 * self.method.gamma)
        return said, heard

    def distance(self):
        pairs = zip(*self.sites, strict=True)
        return sum(float((a - b).abs().double().square().sum()) for a, b in pairs) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_both_ends_move_by_the_same_amount_in_opposite_directions(name, dtype):
    edge = Edge(METHODS[name], dtype)
    for _ in range(5):
        _, (one, other) = edge.round()
        for d, e in zip(one, other, strict=True):
            assert d.dtype == dtype
            assert torch.equal(d, -e)


@pytest.mark.parametrize("name", METHODS)
def test_the_sum_of_both_is_kept_and_they_agree(name):
    edge = Edge(METHODS[name])
    sums = [a + b for a, b in zip(*edge.sites, strict=True)]
    before = edge.distance()
    for _ in range(250 if name.startswith("choco") else 60):
        edge.round()
    assert edge.distance() < 1e-2 * before
    for a, b, kept in zip(*edge.sites, sums, strict=True):
        torch.testing.assert_close(a + b, kept, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "name", ["whole", "choco, largest", "choco, random", "choco, low rank", "power"]
)
def test_imaginary_parts_travel_too(name):
    sites = [[torch.full((7, 5), value)] for value in (0j, 1 + 2j)]
    edge = Edge(METHODS[name])
    edge.sites = sites
    edge.ends = [METHODS[name].end(sites[0], 2, 5, is_first=first) for first in (True, False)]
    before = edge.distance()
    for _ in range(60):
        edge.round()
    assert edge.distance() < 0.1 * before


def test_whole_weights_agree_at_once():
    edge = Edge(Whole())
    mean = [(a + b) / 2 for a, b in zip(*edge.sites, strict=True)]
    edge.round()
    for found in edge.sites:
        for x, y in zip(found, mean, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", METHODS)
def test_letters_are_no_longer_than_announced(name):
    edge, start = Edge(METHODS[name]), drawn(0)
    for _ in range(4):
        said, _ = edge.round()
        assert len(said[0]) == len(said[1]) <= METHODS[name].most_bytes(start)


def test_power_gossip_sends_half_of_both_sides_on_average():
    start = [torch.zeros(40, 30)]
    end = PowerGossip(rank=2).end(start, 0, 1, is_first=True)
    sizes = []
    for _ in range(4):
        said = end.say(Weights(start))
        sizes.append(len(said))
        end.hear(said, said)
    assert sizes == [4 * 2 * 40, 4 * 2 * 30] * 2


def test_power_gossip_of_full_rank_agrees_at_once():
    edge = Edge(PowerGossip(rank=100))
    mean = [(a + b) / 2 for a, b in zip(*edge.sites, strict=True)]
    edge.round()
    for found in edge.sites:
        for x, y in zip(found, mean, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_power_gossip_turns_to_the_largest_difference():
    """A difference of rank 1 is gone after two rounds: the first one finds its direction."""
    one, zero = torch.outer(torch.arange(1.0, 8), torch.arange(2.0, 7)).double(), torch.zeros(7, 5)
    edge = Edge(PowerGossip())
    edge.sites = [[one, *drawn(3)[1:]], [zero.double(), *drawn(3)[1:]]]
    edge.round()
    after = [edge.distance()]
    edge.round()
    after.append(edge.distance())
    assert after[0] > 0.1
    assert after[1] < 1e-12 * after[0]


def test_sites_that_were_equal_find_a_difference_that_comes_later():
    """Vectors that became 0 are drawn anew: else a power iteration would stay there."""
    edge = Edge(PowerGossip())
    edge.sites[1] = [t.clone() for t in edge.sites[0]]
    for _ in range(3):
        edge.round()
    edge.sites[0][0][3, 2] += 1.0
    for _ in range(20):
        edge.round()
    assert edge.distance() < 1e-3


@pytest.mark.parametrize("name", METHODS)
def test_a_letter_that_never_came_changes_nothing(name):
    """`say` may be called again, and says the same of the same weights."""
    edge = Edge(METHODS[name])
    edge.round()
    again = [edge.ends[0].say(Weights(edge.sites[0])) for _ in range(3)]
    assert torch.equal(again[0], again[1])
    assert torch.equal(again[0], again[2])


@pytest.mark.parametrize("name", METHODS)
def test_states_go_on_to_the_bit(name):
    edge, other = Edge(METHODS[name]), Edge(METHODS[name])
    for _ in range(3):
        edge.round()
    for end, new in zip(edge.ends, other.ends, strict=True):
        new.memory.load(end.memory.state())
    other.sites = [[t.clone() for t in x] for x in edge.sites]
    for _ in range(3):
        edge.round()
        other.round()
    for one, two in zip(edge.sites, other.sites, strict=True):
        assert all(map(torch.equal, one, two))


@pytest.mark.parametrize("name", METHODS)
def test_a_letter_of_another_length_is_refused(name):
    edge = Edge(METHODS[name])
    said = edge.ends[0].say(Weights(edge.sites[0]))
    with pytest.raises(ValueError, match=r"a letter of \d+ bytes came, where \d+ were due"):
        edge.ends[0].hear(said, said[:-1])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Choco(reduce=og.wire.Sign(), gamma=0.0), "gamma=0.0; use a number above 0"),
        (lambda: Choco(reduce=(), gamma=0.5), r"reduce=\(\); use one codec"),
        (lambda: Choco(reduce="sign", gamma=0.5), "reduce='sign'; use codecs"),
        (lambda: RandomK(0.0), r"fraction=0.0; use a number in \(0, 1\]"),
        (lambda: LowRank(0), "rank=0; use a whole number, 1 or more"),
        (lambda: PowerGossip(rank=0), "rank=0; use a whole number, 1 or more"),
        (lambda: PowerGossip(gamma=-1), "gamma=-1; use a number above 0"),
        (lambda: Whole(gamma=-1.0), "gamma=-1.0; use a number above 0 and up to 2"),
        (lambda: Whole(gamma=float("nan")), "gamma=nan; use a number above 0"),
        (lambda: PowerGossip(warm=1), "warm=1; use True or False"),
    ],
)
def test_settings_out_of_range(make, told):
    with pytest.raises(ValueError, match=told):
        make()
