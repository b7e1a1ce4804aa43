"""Noise in bands has the covariance, and costs the ε, that are claimed."""

from __future__ import annotations

import copy
import math
import pickle

import dp_accounting as dp
import numpy as np
import pytest
import torch
from dp_accounting import pld, rdp
from torch.utils.data import DataLoader, TensorDataset

import outergrad as og
from outergrad.private import (
    BudgetSpentError,
    CollateEmpty,
    CyclicPoisson,
    CyclicPoissonSampler,
    Fixed,
    Ledger,
    Poisson,
    Release,
    noise_for,
    sampling_of,
)
from outergrad.private.correlated import Banded, coefficients, noise_in_sums
from outergrad.private.noise import Random
from released_noise import released_noise, within

CLIP, SIGMA, BATCH, STEPS, BANDS = 0.3, 1.5, 8, 250, 4
SETTINGS = {"clip": CLIP, "noise": SIGMA, "batch": BATCH}


def strategy(bands: int, steps: int) -> np.ndarray:
    """The square root of the matrix of ones, by multiplying it out, cut to so many bands."""
    root = np.eye(steps)
    for t in range(steps):  # column by column of the first: root @ root must be all ones
        root[t, 0] = 1.0 if t == 0 else (1 - root[1:t, 0] @ root[1:t, 0][::-1]) / 2
    whole = sum(np.diag(np.full(steps - j, root[j, 0]), -j) for j in range(steps))
    assert np.allclose(whole @ whole, np.tril(np.ones((steps, steps))))
    return np.tril(np.triu(whole, 1 - bands))


def released(sites, steps, bands, without=0, **about):
    """Noise on the released sums of each step (steps, 8): samples add nothing."""

    def private_of(_rank):
        private = og.Private(bands=bands, **(SETTINGS | about))
        if without:
            private._banded._of_past = private._banded._of_past[:-without]
        return private

    return released_noise(private_of, sites, steps)[0].double()


def is_independent(z: np.ndarray, deviation: float) -> bool:
    """True if numbers of all steps are independent, with this deviation, up to lag 8."""
    count, found = z.size, [within(float((z**2).sum()), z.size, deviation)]
    for lag in range(1, 9):
        inner = float((z[lag:] * z[:-lag]).sum()) / deviation**2
        found.append(abs(inner) < 5 * math.sqrt(count))
    return all(found)


def drawn(banded: Banded, like: torch.Tensor, sites: int = 1) -> torch.Tensor:
    """Noise of the next step."""
    banded.begin_step()
    return banded.draw(Random(), "w", like, sites)


# -- noise ----------------------------------------------------------------------------------------


def test_coefficients_are_those_of_the_square_root():
    assert coefficients(1) == [1.0]
    assert coefficients(9) == pytest.approx(strategy(9, 9)[:, 0])


@pytest.mark.parametrize("sites", [1, 2, 3])
@pytest.mark.parametrize("about", [{}, {"clipping": "per_layer", "secure": True}])
def test_released_noise_has_the_covariance_that_is_claimed(sites, about):
    """C times the noise of all steps is independent, of deviation σ C ‖c‖."""
    noise = released(sites, STEPS, BANDS, **about).numpy()
    length = np.linalg.norm(strategy(BANDS, BANDS)[:, 0])
    z = strategy(BANDS, STEPS) @ noise
    assert is_independent(z, SIGMA * CLIP * length)


@pytest.mark.parametrize("without", [1, 2, 3])
def test_it_is_noticed_if_a_band_is_missing(without):
    noise = released(2, 1000, BANDS, without=without).numpy()
    length = np.linalg.norm(strategy(BANDS, BANDS)[:, 0])
    assert not is_independent(strategy(BANDS, 1000) @ noise, SIGMA * CLIP * length)


def test_a_row_that_takes_part_once_in_as_many_steps_changes_no_more_than_it_is_counted_for():
    """Its columns of C do not overlap, and have the length that the noise is scaled by."""
    steps, length = 23, np.linalg.norm(coefficients(BANDS))
    c = strategy(BANDS, steps)
    for first in range(BANDS):
        times = np.zeros(steps)
        times[first::BANDS] = 1
        signs = np.where(np.arange(steps) % (2 * BANDS) < BANDS, 1, -1)  # the worst they can do
        for gradients in (times, times * signs):
            turns = CyclicPoisson(1 / BANDS, BANDS).turns(steps)
            assert np.linalg.norm(c @ gradients) <= length * math.sqrt(turns) + 1e-12
    close = np.zeros(steps)
    close[[0, BANDS - 1]] = 1
    assert np.linalg.norm(c @ close) > length * math.sqrt(2)


def test_sums_of_many_steps_have_less_noise():
    """The sum of n steps is that of C⁻¹: the errors of all prefixes, by hand and as drawn."""
    steps, bands = 64, 16
    banded, own = Banded(bands), torch.zeros(4000, dtype=torch.float64)
    sums = torch.stack([drawn(banded, own) for _ in range(steps)]).cumsum(0)
    by_hand = np.tril(np.ones((steps, steps))) @ np.linalg.inv(strategy(bands, steps))
    deviation = np.linalg.norm(coefficients(bands)) * np.linalg.norm(by_hand, axis=1)
    for t in range(steps):
        assert within(float(sums[t].square().sum()), 4000, deviation[t])
    assert deviation[-1] < math.sqrt(steps) / 2  # half of what independent noise has
    assert noise_in_sums(bands, steps) == pytest.approx(math.sqrt((deviation**2).mean()))
    assert noise_in_sums(1, steps) == pytest.approx(math.sqrt((steps + 1) / 2))
    assert noise_in_sums(bands, 3) == pytest.approx(noise_in_sums(3, 3))  # no more than steps


@pytest.mark.parametrize("missed", [{1}, {2, 3}, {0, 4}])
def test_a_step_in_which_nothing_was_sent_keeps_its_place(missed):
    """What is sent in the others has the covariance that it would have had, had all been sent."""
    steps, bands, count = 7, 3, 40_000
    banded, like = Banded(bands), torch.zeros(count, dtype=torch.float64)
    sent = [step for step in range(steps) if step not in missed]
    found = []
    for step in range(steps):
        banded.begin_step()
        if step in sent:
            found.append(banded.draw(Random(), "w", like, 1))
    w = torch.stack(found).numpy()
    inverse = np.linalg.norm(coefficients(bands)) * np.linalg.inv(strategy(bands, steps))
    expected = (inverse @ inverse.T)[np.ix_(sent, sent)]
    spread = np.sqrt((np.outer(expected.diagonal(), expected.diagonal()) + expected**2) / count)
    assert (np.abs(w @ w.T / count - expected) < 5 * spread).all()


def test_noise_that_is_drawn_twice_in_a_step_is_refused():
    """As by a transform around it that does not say when a step begins."""
    private = og.Private(**SETTINGS, bands=2)
    with pytest.raises(RuntimeError, match=r"has to pass begin_step\(\) on"):
        private._banded.draw(Random(), "w", torch.zeros(4), 1)
    drawn(private._banded, torch.zeros(4))
    with pytest.raises(RuntimeError, match="asked for a second time in one step"):
        private._banded.draw(Random(), "w", torch.zeros(4), 1)


def test_a_new_sequence_takes_nothing_back():
    private = og.Private(**SETTINGS, bands=BANDS)
    like = torch.zeros(2000)
    before = [drawn(private._banded, like) for _ in range(BANDS)]
    name = private.sequence
    private.load_state_dict(private.state_dict())
    assert private.sequence != name
    after = drawn(private._banded, like)
    length = np.linalg.norm(coefficients(BANDS))
    assert within(float(after.square().sum()), 2000, float(length))
    for one in before:
        assert abs(float(one @ after)) < 5 * float(one.norm() * length)
    assert len({name, *(og.Private(**SETTINGS).sequence for _ in range(9))}) == 10


def test_copies_have_noise_and_a_sequence_of_their_own():
    private = og.Private(**SETTINGS, bands=BANDS)
    drawn(private._banded, torch.zeros(9))
    for other in (copy.deepcopy(private), pickle.loads(pickle.dumps(private))):
        assert other == private
        assert other.sequence != private.sequence
        assert not other._banded._past


@pytest.mark.parametrize(
    "about", [{"bands": 0}, {"bands": 1.5}, {"noise": 0.0}, {"clipping": "adaptive"}]
)
def test_bands_that_would_not_hold_are_refused(about):
    with pytest.raises(ValueError, match="Private: bands="):
        og.Private(**({"clip": 1.0, "noise": 1.0, "batch": 99, "bands": 2} | about))


def test_other_sites_than_before_are_refused():
    private, like = og.Private(**SETTINGS, bands=2), torch.zeros(4)
    drawn(private._banded, like, sites=3)
    with pytest.raises(RuntimeError, match=r"among 3 sites, and now there are 2: .*restart\(\)"):
        drawn(private._banded, like, sites=2)
    private.restart()
    drawn(private._banded, like, sites=2)


# -- what it costs --------------------------------------------------------------------------------

CYCLIC = CyclicPoisson(0.01, 8)


def by_hand(accountant, rate, noise, times):
    event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise))
    accountant.compose(event if rate < 1 else dp.GaussianDpEvent(noise), times)
    return accountant.get_epsilon(1e-5)


@pytest.mark.parametrize(("name", "of"), [("pld", pld.PLDAccountant), ("rdp", rdp.RdpAccountant)])
@pytest.mark.parametrize(
    ("sampling", "rate"), [(CYCLIC, 0.08), (CyclicPoisson(1 / 8, 8), 1.0)], ids=["drawn", "whole"]
)
def test_epsilon_is_that_of_a_row_which_has_its_turn_once_in_as_many_steps(
    name, of, sampling, rate
):
    ledger = Ledger(1e-5, accountant=name)
    ledger.record(Release(2.0, sampling, bands=8, sequence="first"), 101)  # 13 turns of a part
    assert ledger.epsilon() == pytest.approx(by_hand(of(), rate, 2.0, 13), rel=1e-6)
    ledger.record(Release(2.0, sampling, bands=8, sequence="second"), 1)  # has a turn of any part
    assert ledger.epsilon() == pytest.approx(by_hand(of(), rate, 2.0, 14), rel=1e-6)


def test_several_sites_see_as_much_as_of_independent_noise():
    release = Release(2.0, CYCLIC, sites=4, sums="masked", bands=8, sequence="one")
    ledger = Ledger(1e-5, accountant="rdp")
    ledger.record(release, 80)
    expected = by_hand(rdp.RdpAccountant(), 0.08, 2.0 * math.sqrt(3 / 4), 10)
    assert ledger.epsilon("site") == pytest.approx(expected, rel=1e-6)
    state = Ledger(1e-5, accountant="rdp")
    state.load_state_dict(ledger.state_dict())
    assert state.runs == ledger.runs


def test_a_budget_stops_before_the_step_that_begins_another_turn():
    allowed = by_hand(rdp.RdpAccountant(), 0.08, 2.0, 3) * 1.001
    ledger = Ledger(1e-5, accountant="rdp", stop_at=allowed)
    release = Release(2.0, CYCLIC, bands=8, sequence="one")
    for _ in range(24):
        ledger.check(release)
        ledger.record(release)
    with pytest.raises(BudgetSpentError):
        ledger.check(release)


def test_noise_for_a_budget():
    noise = noise_for(2.0, 1e-5, CYCLIC, 101, accountant="rdp")
    assert by_hand(rdp.RdpAccountant(), 0.08, noise, 13) == pytest.approx(2.0, rel=0.01)


REFUSED = {
    "poisson": (
        lambda: Release(1.0, Poisson(0.1), bands=2),
        r"bands=2, with Poisson batches .*CyclicPoissonSampler\(rows, rate, parts=2\)",
    ),
    "fixed": (lambda: Release(1.0, Fixed(5, 50, fresh=False), bands=2), "less than 2 steps apart"),
    "too few parts": (
        lambda: Release(1.0, CYCLIC, bands=9, sequence="one"),
        "less than 9 steps apart",
    ),
    "none": (lambda: Release(1.0, CYCLIC, bands=0, sequence="one"), "bands must be 1 or more"),
    "sequence": (lambda: Release(1.0, CYCLIC, bands=8), "private.sequence"),
    "parts": (lambda: CyclicPoisson(0.1, 0), "parts must be 1 or more"),
    "rate": (lambda: CyclicPoisson(0.2, 6), r"at most 1/parts = 0\.166667, not 0\.2"),
    "rows": (lambda: CyclicPoissonSampler(5, 0.1, 6), "rows must be parts=6 or more"),
    "replace": (
        lambda: noise_for(1.0, 1e-5, CYCLIC, 9, adjacency="replace"),
        "parts in turn: no bound is known",
    ),
}


@pytest.mark.parametrize(("act", "said"), REFUSED.values(), ids=REFUSED)
def test_what_would_not_hold_is_refused(act, said):
    with pytest.raises(ValueError, match=said):
        act()


# -- batches --------------------------------------------------------------------------------------


def test_a_row_has_its_turn_once_in_as_many_steps_with_the_rate_of_its_part():
    rows, parts, cycles = 40, 4, 2000
    sampler = CyclicPoissonSampler(rows, 0.05, parts, seed=1, steps=10)
    batches = [batch for _ in range(parts * cycles // 10) for batch in sampler]
    counts = np.zeros(rows)
    for number, batch in enumerate(batches):
        assert all(row % parts == number % parts for row in batch)
        counts[batch] += 1
    spread = cycles * 0.2 * 0.8
    assert np.abs(counts - cycles * 0.2).max() < 5 * math.sqrt(spread)
    assert abs(sum(map(len, batches)) / len(batches) - rows * 0.05) < 0.1


def test_parts_go_on_in_turn_behind_a_saved_state():
    whole = CyclicPoissonSampler(40, 0.05, 4, seed=1, steps=7)
    first = CyclicPoissonSampler(40, 0.05, 4, seed=1, steps=7)
    expected = [batch for _ in range(2) for batch in whole]
    taken = [batch for batch, _ in zip(first, range(6), strict=False)]
    other = CyclicPoissonSampler(40, 0.05, 4, steps=7)
    other.load_state_dict(first.state_dict())
    other.go_to(6)
    assert taken + [batch for _ in range(2) for batch in other] == expected


def test_a_loader_tells_how_it_draws():
    data = TensorDataset(torch.arange(40.0))
    sampler = CyclicPoissonSampler(40, 0.05, 4)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=CollateEmpty(data))
    assert sampling_of(loader) == CyclicPoisson(0.05, 4)
    with pytest.raises(ValueError, match="CyclicPoissonSampler draws empty batches"):
        sampling_of(DataLoader(data, batch_sampler=sampler))
