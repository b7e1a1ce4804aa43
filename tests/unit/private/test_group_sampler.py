"""Patients are drawn as rows are elsewhere, each by itself, and come with their rows."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import DataLoader, TensorDataset

from outergrad.private import CollateEmpty, Ledger, Poisson, PoissonSampler, Release, sampling_of

PATIENTS, RATE, DRAWS = 40, 0.05, 4000
IMAGES = [1 + patient % 5 for patient in range(PATIENTS)]
IDS = np.random.default_rng(0).permutation(np.repeat(np.arange(PATIENTS), IMAGES))
ROWS = len(IDS)


def sampler(**about) -> PoissonSampler:
    settings = {"groups": IDS.tolist(), "unit": "patient", "seed": 1, "steps": DRAWS}
    return PoissonSampler(ROWS, RATE, **(settings | about))


def patients(batch: list[int]) -> Counter:
    return Counter(IDS[batch].tolist())


def test_each_patient_comes_with_all_rows_and_by_itself():
    drawn = [*sampler()]
    assert all(len(set(batch)) == len(batch) for batch in drawn)
    counted = [patients(batch) for batch in drawn]
    assert all(n == IMAGES[one] for batch in counted for one, n in batch.items())
    times = Counter(chain.from_iterable(batch.keys() for batch in counted))
    spread = DRAWS * RATE * (1 - RATE)
    chi2 = sum((times[one] - DRAWS * RATE) ** 2 / spread for one in range(PATIENTS))
    assert stats.chi2.sf(chi2, PATIENTS) > 1e-3
    sizes = np.bincount([min(len(batch), 6) for batch in counted], minlength=7)
    expected = DRAWS * stats.binom.pmf(np.arange(7), PATIENTS, RATE)
    expected[-1] = DRAWS * stats.binom.sf(5, PATIENTS, RATE)
    assert stats.chisquare(sizes, expected).pvalue > 1e-3
    assert sizes[0] > 0


def test_at_most_so_many_rows_of_a_patient_each_as_likely():
    drawn = [*sampler(at_most=2)]
    counted = [patients(batch) for batch in drawn]
    assert all(n == min(2, IMAGES[one]) for batch in counted for one, n in batch.items())
    assert all(len(set(batch)) == len(batch) for batch in drawn)
    times = Counter(chain.from_iterable(drawn))
    many = [row for row in range(ROWS) if IMAGES[IDS[row]] == 5]
    of_rows = np.array([times[row] for row in many])
    assert stats.chisquare(of_rows).pvalue > 1e-3


def test_the_ledger_is_told_of_patients():
    data = TensorDataset(torch.arange(ROWS, dtype=torch.float32), torch.from_numpy(IDS))
    loader = DataLoader(data, batch_sampler=sampler(), collate_fn=CollateEmpty(data))
    sampling = sampling_of(loader)
    assert sampling == Poisson(RATE, "patient") != Poisson(RATE)
    assert sampler().units == PATIENTS
    ledger = Ledger(1e-5)
    ledger.record(Release(1.0, sampling, sites=2))
    assert "Poisson batches at rate 0.05 per patient" in str(ledger)
    again = Ledger(1e-5)
    again.load_state_dict(ledger.state_dict())
    assert again.runs == ledger.runs
    of_rows = Ledger(1e-5)
    of_rows.record(Release(1.0, Poisson(RATE), sites=2))
    assert of_rows.epsilon() == ledger.epsilon()


def test_it_goes_on_to_the_bit():
    whole, first = [*sampler(at_most=2)], sampler(at_most=2)
    first.go_to(17)
    resumed = sampler(at_most=2, seed=None)
    resumed.load_state_dict(first.state_dict())
    assert [*resumed] == whole[17:]
    for other in (
        PoissonSampler(ROWS, RATE),
        sampler(unit="person"),
        sampler(groups=(IDS // 2).tolist()),
    ):
        with pytest.raises(ValueError, match="the state is of"):
            other.load_state_dict(first.state_dict())


def test_a_number_and_its_text_are_one_group():
    assert PoissonSampler(3, 1.0, groups=[7, "7", "eight"], unit="patient").units == 2
    assert PoissonSampler(3, 1.0, groups=torch.tensor([7, 7, 7]), unit="patient").units == 1


@pytest.mark.parametrize(
    ("about", "error", "said"),
    [
        ({"groups": [1, 2]}, ValueError, "groups has 2 ids, and there are 120 rows"),
        ({"groups": [None] * ROWS}, TypeError, "a NoneType is no id"),
        ({"unit": None}, ValueError, r"pass unit='patient', as to og.Private\(unit=\)"),
        ({"at_most": 0}, ValueError, "at_most must be 1 or more, not 0"),
        ({"at_most": 2, "groups": None}, ValueError, "pass groups=, or leave it out"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(about, error, said):
    with pytest.raises(error, match=said):
        sampler(**about)
