"""Canaries give a lower bound of ε, which less noise than claimed exceeds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from scipy.stats import binom

import outergrad as og
from outergrad_lab.canaries import Audit, Seen, highest_share, lowest_share

DELTA = 1e-2
RELEASE = og.private.Release(1.4, og.private.Poisson(0.5), sites=2, sums="masked")
AUDIT = Audit(release=RELEASE, steps=2, trainings=40)


@cache
def measured(shares: tuple[float, ...] = ()) -> float:
    return replace(AUDIT, shares=shares).run().epsilon(DELTA)


@pytest.mark.slow
def test_the_bound_stays_below_what_the_ledger_claims():
    assert AUDIT.claimed(DELTA) / 2 < measured() < AUDIT.claimed(DELTA)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(0.5, 0.5), (1.0, 0.0), (0.0, 1.0)], ids=str)
def test_less_noise_exceeds_what_the_ledger_claims(shares):
    assert measured(shares) > AUDIT.claimed(DELTA)


@pytest.mark.slow
def test_sites_do_not_share_their_noise():
    """Equal noise on both sites would have twice the variance of that which is claimed."""
    claimed = replace(AUDIT, release=replace(RELEASE, noise=2**0.5 * RELEASE.noise))
    assert measured() > claimed.claimed(DELTA)


@pytest.mark.parametrize(("hits", "trials"), [(3, 10), (0, 7), (7, 7), (20, 5000)])
def test_shares_are_those_at_which_the_hits_become_unlikely(hits, trials):
    low, high = lowest_share(hits, trials), highest_share(hits, trials)
    assert low <= hits / trials <= high
    if hits:
        assert binom.sf(hits - 1, trials, low) == pytest.approx(0.025)
    if hits < trials:
        assert binom.cdf(hits, trials, high) == pytest.approx(0.025)


def test_an_observer_who_knows_nothing_finds_no_bound():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(20, 500, generator=generator, dtype=torch.float64)
    there = torch.rand(20, 500, generator=generator) < 0.5
    assert Seen(scores, there).epsilon(1e-5) < 0.1


def test_an_observer_who_knows_all_is_bounded_by_the_trials_alone():
    there = torch.rand(20, 500, generator=torch.Generator().manual_seed(0)) < 0.5
    found = Seen(there.double(), there).epsilon(1e-5)
    assert 6.5 < found < 7.5  # of some 2,500 who were not there, none looked as if
