"""Thresholds: quantiles of known distributions, and densities that are met on any other."""

from __future__ import annotations

import math
import re

import pytest
import torch

from outergrad.linalg import selection
from outergrad.linalg.selection import (
    FITS,
    exceeding,
    exponential_quantile,
    gamma_quantile,
    pareto_quantile,
    tail,
    threshold,
)

ENTRIES = 200_000
DENSITIES = (0.5, 0.1, 0.01, 0.001)
NAN, INF = float("nan"), float("inf")


def uniform():
    """Evenly spaced in (0, 1), so that quantiles have no sampling error, and shuffled."""
    return (torch.randperm(ENTRIES) + 0.5).double() / ENTRIES


def signed(magnitudes):
    return magnitudes * torch.where(torch.rand(len(magnitudes)) < 0.5, -1.0, 1.0)


def exponential(u):
    return -3 * u.log()


def pareto(shape):
    return lambda u: 2 / shape * (u.pow(-shape) - 1)


def half_normal(u):
    return math.sqrt(2) * torch.special.erfinv(1 - u)


def gamma_draws(shape):
    return torch.distributions.Gamma(torch.tensor(shape).double(), 0.5).sample((ENTRIES,))


# What a distribution is, the fits that it belongs to, and the share of error that these may have:
# moments of heavy tails are less certain.
KNOWN = {
    "exponential": (lambda: exponential(uniform()), FITS, 0.01),
    "gamma, 0.3": (lambda: gamma_draws(0.3), ["gamma"], 0.03),
    "gamma, 0.7": (lambda: gamma_draws(0.7), ["gamma"], 0.03),
    "gamma, 4": (lambda: gamma_draws(4.0), ["gamma"], 0.03),
    "pareto, 0.1": (lambda: pareto(0.1)(uniform()), ["pareto"], 0.01),
    "pareto, -0.4": (lambda: pareto(-0.4)(uniform()), ["pareto"], 0.01),
    "uniform": (uniform, ["pareto"], 0.01),
}
CASES = [(name, fit) for name, (_, fits, _) in KNOWN.items() for fit in fits]


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize(("name", "fit"), CASES)
def test_one_stage_finds_the_quantile_of_its_own_distribution(name, fit, density):
    draw, _, error = KNOWN[name]
    magnitudes = draw()
    exact = magnitudes.quantile(1 - density).item()
    found = threshold(signed(magnitudes), density, fit, stages=1)
    assert found.item() == pytest.approx(exact, rel=error)


@pytest.mark.parametrize("density", [0.01, 0.001])
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("name", ["half normal", "pareto, 0.3"])
def test_stages_bring_the_quantile_of_another_one_nearer(name, fit, density):
    magnitudes = half_normal(uniform()) if name == "half normal" else pareto(0.3)(uniform())
    exact = magnitudes.quantile(1 - density).item()
    stages = math.ceil(math.log(1 / density, 4))
    once, often = (threshold(magnitudes, density, fit, n).item() for n in (1, stages))
    error = 0.07 if fit == "exponential" else 0.01  # its tail has one parameter only
    assert often == pytest.approx(exact, rel=error)
    if fit != "pareto":
        assert abs(often - exact) < 0.15 * abs(once - exact)


@pytest.mark.parametrize("share", [0.9, 0.25, 0.01, 1e-6])
def test_quantiles_agree_where_the_distributions_do(share):
    x = exponential(uniform())
    expected = exponential_quantile(x, share)
    assert expected == pytest.approx(-3 * math.log(share), rel=1e-4)
    assert gamma_quantile(x, share) == pytest.approx(expected, rel=1e-3)
    assert pareto_quantile(x, share) == pytest.approx(expected, rel=1e-2)


def test_a_pareto_distribution_of_shape_zero_is_exponential():
    x = torch.tensor([1e-300, 2.0], dtype=torch.float64)  # of mean and variance 1
    assert pareto_quantile(x, 0.1) == pytest.approx(math.log(10))
    assert exponential_quantile(x, 0.1) == pytest.approx(math.log(10))


@pytest.mark.parametrize("fit", FITS)
def test_the_scale_is_that_of_the_numbers(fit):
    x = gamma_draws(0.6)
    one = threshold(x, 0.01, fit, stages=3).item()
    for scale in (1e-30, 1e-3, 1e30):
        assert threshold(scale * x, 0.01, fit, stages=3).item() == pytest.approx(scale * one)


def with_some(value):
    return torch.randn(ENTRIES).index_fill(0, torch.arange(0, ENTRIES, 4000), value)


# Without many equal numbers.
ANY = {
    "normal": lambda: torch.randn(ENTRIES),
    "log-normal": lambda: torch.randn(ENTRIES) * (2 * torch.randn(ENTRIES)).exp(),
    "cauchy": lambda: torch.randn(ENTRIES) / torch.randn(ENTRIES),
    "uniform": lambda: uniform().float(),
    "bounded below": lambda: 5 + uniform().float(),
    "two sizes": lambda: torch.randn(ENTRIES) * torch.where(torch.rand(ENTRIES) < 0.02, 1e4, 1.0),
    "half zeros": lambda: torch.randn(ENTRIES) * (torch.rand(ENTRIES) < 0.5),
    "huge": lambda: torch.randn(ENTRIES) * 5e37,
    "bfloat16": lambda: torch.randn(ENTRIES).bfloat16(),
    "few": lambda: torch.randn(1500),
    "some NaN": lambda: with_some(NAN),
    "some infinite": lambda: with_some(-INF),
}


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("name", ANY)
def test_densities_are_met_to_a_twentieth_or_one_entry(name, fit):
    flat = ANY[name]()
    for density in (0.3, 0.1, 0.01, 0.001):
        found = threshold(flat, density, fit)
        count = len(exceeding(flat, found).indices_C)
        wanted = density * len(flat)
        assert abs(count - wanted) <= max(0.05 * wanted, 1), density
        assert found.dtype == flat.dtype
        assert found.shape == ()


def test_a_density_that_cannot_be_met_is_less():
    zeros = torch.zeros(1000)
    for fit in FITS:
        assert threshold(zeros, 0.1, fit) == 0
        assert threshold(zeros, 0.1, fit, stages=2) == 0
        assert threshold(zeros.index_fill(0, torch.arange(50), 3.0), 0.1, fit) == 0
        assert threshold(torch.full((1000,), -2.0), 0.1, fit) == 2
        assert threshold(torch.randn(1000), 1.0, fit) == 0
        assert threshold(torch.full((9,), INF), 0.1, fit) == INF
        assert threshold(torch.full((9,), NAN), 0.1, fit).isnan()
        assert threshold(torch.tensor([-7.0]), 1.0, fit) == 0


@pytest.mark.parametrize("wanted", [1, 30, 1000, 50_000])
def test_a_tail_is_the_largest_entries_and_few_more(wanted):
    for name in ("normal", "log-normal", "cauchy", "uniform", "two sizes"):
        flat = ANY[name]()
        found = tail(flat, wanted)
        assert found is not None
        count = len(found.indices_C)
        assert wanted <= count <= 2 * wanted + 100
        assert found.magnitudes_C.equal(flat[found.indices_C].abs())
        assert found.magnitudes_C.min() > found.threshold
        assert int((flat.abs() > found.threshold).sum()) == count


def test_a_tail_is_found_where_the_sample_is_of_larger_entries():
    flat = torch.randn(ENTRIES)
    flat[selection._sample(torch.arange(ENTRIES))] *= 1.5
    found = tail(flat, 0.15 * ENTRIES)
    assert found is not None
    assert 0.15 * ENTRIES <= len(found.indices_C) <= 0.5 * ENTRIES


def test_there_is_no_tail_of_zeros_or_of_equal_numbers():
    assert tail(torch.zeros(1000), 10) is None
    assert tail(torch.ones(1000), 10) is None
    assert tail(torch.ones(1000), 1000) is not None


CHUNK = selection._CHUNK


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 1])
def test_what_exceeds_a_threshold_is_found_chunk_by_chunk(length):
    flat = torch.randn(length)
    flat[-1] = NAN
    found = exceeding(flat, torch.tensor(0.5))
    expected = ~(flat.abs() <= 0.5)
    assert found.indices_C.equal(expected.nonzero().view(-1))
    assert found.indices_C[-1] == length - 1


@pytest.mark.parametrize("n", [selection.SAMPLE + 1, 3 * selection.SAMPLE, 1 << 17, 1_000_000])
def test_a_sample_is_of_different_entries_of_all_columns(n):
    sample = selection._sample(torch.arange(n))
    assert len(sample) == len(sample.unique()) == selection.SAMPLE
    for width in (2, 64, 100, 1024):
        of_column = torch.bincount(sample % width, minlength=width)
        assert of_column.min() > 0.8 * selection.SAMPLE / width
    assert torch.bincount(sample * 64 // n).min() > 0.9 * selection.SAMPLE / 64


REFUSED = {
    "use a number in": {"density": 0.0},
    "use a number in (0, 1]": {"density": 1.5},
    "use one of 'exponential', 'gamma', 'pareto'": {"fit": "normal"},
    "use at least 1": {"stages": 0},
    "use gradient.flatten()": {"flat": torch.randn(2, 3)},
    "torch.int64": {"flat": torch.arange(3)},
    "flat gradient with entries": {"flat": torch.randn(0)},
}


@pytest.mark.parametrize("words", REFUSED)
def test_arguments_out_of_their_range_are_refused(words):
    with pytest.raises(ValueError, match=f"^.*{re.escape(words)}.*$") as error:
        threshold(**{"flat": torch.randn(10), "density": 0.5, **REFUSED[words]})
    assert "\n" not in str(error.value)
