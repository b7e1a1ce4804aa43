"""Push-sum: what sites give away and take keeps both sums, and their ratio becomes the mean."""

from __future__ import annotations

import pytest
import torch

import outergrad as og
from outergrad.gossip import LowRank, RandomK, Ring, SparsePush, Whole
from outergrad.gossip.push import LEAST_MASS, PushSum
from outergrad.linalg.finite import is_finite

SHAPES = [(7, 5), (5,), (3, 4, 2, 2), (), (1, 6), (0, 3)]
METHODS = {
    "whole": Whole(),
    "largest": SparsePush(reduce=og.wire.TopK(0.2), gamma=0.1),
    "random": SparsePush(reduce=RandomK(0.2), gamma=0.1),
    "signs": SparsePush(reduce=og.wire.Sign(), gamma=0.1),
    "low rank": SparsePush(reduce=LowRank(1), gamma=0.1),
}
THREE = {0: (1, 2), 1: (2,), 2: (0,)}
"""Who gives to whom: site 2 gets more than it would of a balanced graph."""


def drawn(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES
    ]


class Sites:
    """Three sites in one process, of which each gives in every round."""

    def __init__(self, method, dtype=torch.float64, differ=True):
        self.method, self.step = method, 0
        self.weights = [drawn(0, dtype) for _ in THREE]
        self.sums = [PushSum(weights, method) for weights in self.weights]
        for site, weights in enumerate(self.weights if differ else ()):
            for p, change in zip(weights, drawn(site + 1, dtype), strict=True):
                p.add_(change)

    def round(self):
        letters = []
        for one in self.sums:
            one.take_steps()
        for site, receivers in THREE.items():
            share = self.method.gamma / (1 + len(receivers))
            content = self.sums[site].give(len(receivers), share, self.step)
            letters += [(receiver, content, share) for receiver in receivers]
        for receiver, content, share in letters:
            self.sums[receiver].take(content, share)
        for one in self.sums:
            one.show()
        self.step += 1
        return letters

    def total(self):
        return [sum(parts) for parts in zip(*(one.x for one in self.sums), strict=True)]

    @property
    def mass(self):
        return sum(one.mass for one in self.sums)

    def distance(self):
        """Distance of all sites from each other."""
        return sum(
            float((p - q).square().sum())
            for weights in self.weights
            for p, q in zip(weights, self.weights[0], strict=True)
        )


@pytest.mark.parametrize("name", METHODS)
def test_the_sums_are_kept_and_sites_agree_on_their_ratio(name):
    sites = Sites(METHODS[name])
    means = [sum(parts) / 3 for parts in zip(*sites.weights, strict=True)]
    before = sites.distance()
    sites.round()
    total = sites.total()
    for _ in range(60):
        sites.round()
    for kept, now in zip(total, sites.total(), strict=True):
        torch.testing.assert_close(now, kept, rtol=0, atol=1e-12)
    assert sites.mass == pytest.approx(3, abs=1e-12)
    assert max(one.mass for one in sites.sums) > 1.2
    assert sites.distance() < 0.05 * before
    found = [sum(parts) for parts in zip(*(one.summands() for one in sites.sums), strict=True)]
    sites.sums[0].begin_at_mean(found)
    for p, mean in zip(sites.weights[0], means, strict=True):
        torch.testing.assert_close(p, mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("name", ["whole", "largest", "random"])
def test_weights_keep_their_dtype(name, dtype):
    sites = Sites(METHODS[name], dtype)
    for _ in range(5):
        sites.round()
    assert all(p.dtype == dtype and is_finite(p) for one in sites.weights for p in one)


def test_a_step_of_the_optimizer_counts_alike_whatever_mass_a_site_has():
    """The mean over all sites moves by a third of the step, at a site with more or less mass."""
    sites = Sites(Whole())
    for _ in range(5):
        sites.round()
    for site, one in enumerate(sites.sums):
        before = sites.total()
        with torch.no_grad():
            for p in sites.weights[site]:
                p.add_(0.5)
        assert one.mass != pytest.approx(1, abs=1e-3)
        one.take_steps()
        for now, then in zip(sites.total(), before, strict=True):
            torch.testing.assert_close(now - then, torch.full_like(now, 0.5), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["largest", "random", "signs", "low rank"])
def test_what_is_left_out_is_told_later(name):
    """What a site has told and what it owes add up to what it had to tell in all rounds."""
    weights, rounds = drawn(0), 30
    one, other = (PushSum(weights, METHODS[name]) for _ in range(2))
    for p, change in zip(weights, drawn(1), strict=True):
        p.add_(change)
    one.take_steps()
    for step in range(rounds):
        other.take(one.give(0, 0.5, step), 0.5)
    owed = one.state()["kept"]["owed"]
    for x, told, left in zip(one.x, other.x, owed, strict=True):
        torch.testing.assert_close(2 * told + left, rounds * x, rtol=0, atol=1e-12)
        assert left.norm() <= rounds * x.norm() / 2


def test_what_has_not_changed_since_the_start_does_not_move():
    sites = Sites(METHODS["largest"], differ=False)
    start = [t.clone() for t in sites.weights[0]]
    for _ in range(10):
        sites.round()
    for weights in sites.weights:
        for p, then in zip(weights, start, strict=True):
            torch.testing.assert_close(p, then, rtol=0, atol=1e-15)


def test_a_site_keeps_a_least_mass():
    """It would otherwise lose half of it each time that it gives and gets nothing."""
    one = PushSum(drawn(0), Whole())
    masses, sizes = [], []
    for step in range(6):
        sizes.append(len(one.give(1, 0.5, step)))
        masses.append(one.mass)
    assert masses == [0.5, 0.25, LEAST_MASS, LEAST_MASS, LEAST_MASS, LEAST_MASS]
    assert sizes[:3] == [sizes[0]] * 3
    assert sizes[3:] == [24] * 3
    before = [x.clone() for x in one.x]
    one.take(one.give(1, 0.5, 6), 0.5)
    assert all(map(torch.equal, one.x, before))
    assert one.mass == LEAST_MASS


@pytest.mark.parametrize("name", METHODS)
def test_weights_that_are_not_finite_are_given_to_nobody(name):
    sites = Sites(METHODS[name])
    with torch.no_grad():
        sites.weights[1][0][2, 3] = float("nan")
    for _ in range(3):
        sites.round()
    finite = [all(map(is_finite, weights)) for weights in sites.weights]
    assert finite == [True, False, True]
    assert sites.mass == pytest.approx(3, abs=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_a_saved_part_goes_on_to_the_bit(name):
    sites, other = Sites(METHODS[name]), Sites(METHODS[name])
    for _ in range(3):
        sites.round()
    for new, old, to, weights in zip(
        other.sums, sites.sums, other.weights, sites.weights, strict=True
    ):
        for p, q in zip(to, weights, strict=True):
            p.copy_(q)
        new.load(old.state())
    other.step = sites.step
    for _ in range(3):
        sites.round()
        other.round()
    for one, two in zip(sites.weights, other.weights, strict=True):
        assert all(map(torch.equal, one, two))
    assert [one.mass for one in sites.sums] == [one.mass for one in other.sums]


@pytest.mark.parametrize("name", METHODS)
def test_letters_are_no_longer_than_announced(name):
    sites = Sites(METHODS[name])
    for _, content, _ in sites.round():
        assert len(content) <= sites.sums[0].most_bytes
    whole = sites.sums[0].give(1, 0.5, 1, whole=True)
    assert len(whole) <= sites.sums[0].most_bytes


def about(*numbers):
    return torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)


@pytest.mark.parametrize(
    ("content", "share", "told"),
    [
        (about(1, 0, 0)[:-1], 0.5, "a letter of 23 bytes came, where 24 were due"),
        (torch.cat([about(1, 0, 0), about(1)]), 0.5, "a letter of 8 bytes came"),
        (about(float("nan"), 0, 0), 0.5, "mass nan came"),
        (about(-1, 0, 0), 0.5, "mass -1.0 came"),
        (about(1, -1, 0), 0.5, "a letter of step -1"),
        (about(1, 0, 0), 1.0, "share 1.0"),
    ],
)
def test_letters_that_cannot_be(content, share, told):
    with pytest.raises(ValueError, match=told):
        PushSum(drawn(0), Whole()).take(content, share)


def test_numbers_that_are_not_finite_are_taken_of_nobody():
    one = PushSum([torch.zeros(2)], Whole())
    bad = torch.tensor([1.0, float("inf")]).view(torch.uint8)
    with pytest.raises(ValueError, match="numbers are not finite"):
        one.take(torch.cat([about(1, 0, 1), bad]), 0.5)
    assert one.mass == 1


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: SparsePush(reduce=og.wire.Sign(), gamma=0), "gamma=0; use a number above 0"),
        (lambda: SparsePush(reduce=og.wire.Sign(), gamma=1.5), "and up to 1"),
        (lambda: SparsePush(reduce=(), gamma=0.5), r"SparsePush: reduce=\(\); use one codec"),
        (
            lambda: og.Gossip(Ring(directed=True), og.gossip.PowerGossip()),
            "needs edges that go both ways: use None",
        ),
        (lambda: og.Gossip(Ring(directed=True), Whole(gamma=1.2)), "needs edges that go both ways"),
        (lambda: og.Gossip("ring", METHODS["largest"]), "goes along directed edges"),
    ],
)
def test_settings_that_do_not_fit(make, told):
    with pytest.raises(ValueError, match=told):
        make()
