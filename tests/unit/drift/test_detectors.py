"""Detectors on streams of which it is known when they change."""

from __future__ import annotations

import io
import math

import pytest
import torch
from scipy.stats import ks_2samp

import outergrad as og
from outergrad.core import packages
from outergrad.drift.kolmogorov_smirnov import distribution_distance

DETECTORS = {
    "windows": og.drift.KolmogorovSmirnov(reference=100, window=40),
    "windows, higher": og.drift.KolmogorovSmirnov(reference=100, window=40, worse="higher"),
    "reference kept": og.drift.KolmogorovSmirnov(reference=100, window=40, keeps=True),
    "page-hinkley": og.drift.PageHinkley(threshold=15.0, delta=0.3),
    "page-hinkley, up": og.drift.PageHinkley(threshold=15.0, delta=0.3, mode="up"),
    "adwin": og.drift.ADWIN(),
}
SIDED = ("windows, higher", "page-hinkley, up")
BEFORE, AFTER = 400, 100


def stream(seed, shift=0.0):
    """Normal values, some per check, whose mean changes behind the first `BEFORE` checks."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(BEFORE + AFTER, 3, generator=generator, dtype=torch.float64)
    values[BEFORE:] += shift
    return values


def alarms(detector, values):
    """The checks at which a run sees drift; each begins a new one."""
    monitor, found = detector.start(), []
    for number, one in enumerate(values):
        if monitor.has_drifted(one):
            found.append(number)
            monitor = detector.start()
    return found


@pytest.mark.parametrize("name", DETECTORS)
def test_a_steady_stream_has_no_drift(name):
    assert [alarms(DETECTORS[name], stream(seed)) for seed in range(3)] == [[]] * 3


@pytest.mark.parametrize("shift", [3.0, -3.0])
@pytest.mark.parametrize("name", DETECTORS)
def test_a_shift_is_found_soon_and_in_its_direction_alone(name, shift):
    for seed in range(3):
        found = alarms(DETECTORS[name], stream(seed, shift))
        if name in SIDED and shift < 0:
            assert found == []
        else:
            assert found
            assert BEFORE <= found[0] < BEFORE + 40


def test_another_spread_around_the_same_mean_is_a_drift_of_the_distribution():
    values = stream(0)
    values[BEFORE:] *= 4
    (first, *_) = alarms(DETECTORS["windows"], values)
    assert BEFORE <= first < BEFORE + 20


def test_a_kept_reference_sees_slow_drift_that_one_that_moves_along_does_not():
    values = stream(0) + torch.linspace(0, 3, BEFORE + AFTER, dtype=torch.float64)[:, None]
    assert alarms(DETECTORS["reference kept"], values)
    assert not alarms(DETECTORS["windows"], values)


def test_windows_are_blind_until_they_are_full():
    detector = og.drift.KolmogorovSmirnov(reference=10, window=5, alpha=0.1)
    monitor = detector.start()
    seen = [monitor.has_drifted(torch.tensor([float(k > 9)]).double()) for k in range(15)]
    assert seen == [False] * 14 + [True]


@pytest.mark.parametrize("keeps", [False, True])
def test_how_values_are_divided_into_checks_does_not_matter(keeps):
    detector = og.drift.KolmogorovSmirnov(reference=50, window=20, keeps=keeps)
    values = stream(1).reshape(-1)
    one, other = detector.start(), detector.start()
    for first in range(0, len(values), 100):
        part = values[first : first + 100]
        by_one = [one.has_drifted(v.reshape(1)) for v in part]
        assert other.has_drifted(part) == by_one[-1]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("n", "m"), [(7, 5), (40, 11), (3, 90)])
def test_the_distance_is_that_of_scipy(n, m, ties):
    generator = torch.Generator().manual_seed(n + m)
    x, y = (torch.randn(k, generator=generator, dtype=torch.float64) for k in (n, m))
    if ties:
        x, y = x.round(), y.round()
    # scipy's alternatives are about distribution functions: "greater" is F of x above that of y.
    for ours, theirs in (("either", "two-sided"), ("higher", "greater"), ("lower", "less")):
        expected = ks_2samp(x.numpy(), y.numpy(), alternative=theirs).statistic
        assert distribution_distance(x, y, ours) == pytest.approx(expected, abs=1e-12)


def test_the_limit_is_the_textbook_s():
    """c(0.05) = 1.358 and c(0.01) = 1.628, times sqrt((n + m) / (n m))."""
    for alpha, c in ((0.05, 1.358), (0.01, 1.628)):
        found = og.drift.KolmogorovSmirnov(reference=30, window=20, alpha=alpha).limit
        assert found == pytest.approx(c * math.sqrt(50 / 600), abs=1e-3)


def test_false_alarms_of_independent_windows_are_as_rare_as_alpha():
    """At 5 % some 50 of a thousand; Smirnov's limit errs on the side of fewer."""
    detector = og.drift.KolmogorovSmirnov(reference=200, window=100, alpha=0.05)
    values = torch.randn(1000, 300, generator=torch.Generator().manual_seed(0)).double()
    found = sum(detector.start().has_drifted(one) for one in values)
    assert 20 <= found <= 70


@pytest.mark.parametrize("cut", [0, 1, 60, BEFORE + 3])
@pytest.mark.parametrize("name", DETECTORS)
def test_a_saved_run_goes_on_to_the_bit(name, cut):
    values, detector = stream(2, 1.0), DETECTORS[name]
    whole = detector.start()
    for one in values[:cut]:
        whole.has_drifted(one)
    file = io.BytesIO()
    torch.save(whole.state(), file)
    file.seek(0)
    again = detector.start()
    again.load(torch.load(file, weights_only=True))
    for one in values[cut:]:
        assert whole.has_drifted(one) == again.has_drifted(one)
    assert str(whole.state()) == str(again.state())


@pytest.mark.parametrize("make", [og.drift.PageHinkley, og.drift.ADWIN])
def test_a_missing_package_is_one_line_with_its_remedy(monkeypatch, make):
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"river not found: pip install 'river>=0.22'$"):
        make()


REFUSED = {
    "reference": ({"reference": 1}, "reference=1; use a whole number, 2 or more"),
    "window": ({"window": 2.5}, "window=2.5; use a whole number"),
    "alpha": ({"alpha": 1.0}, "alpha=1.0; use a float above 0 and below 1"),
    "worse": ({"worse": "up"}, "worse='up'; use 'either', 'higher' or 'lower'"),
    "keeps": ({"keeps": 1}, "keeps=1; use True or False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_are_refused_with_a_remedy(name):
    settings, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^KolmogorovSmirnov: {message}"):
        og.drift.KolmogorovSmirnov(**settings)


def test_settings_of_river_are_refused_with_a_remedy():
    with pytest.raises(ValueError, match="PageHinkley: mode='higher'; use 'up', 'down' or 'both'"):
        og.drift.PageHinkley(mode="higher")
    with pytest.raises(ValueError, match=r"ADWIN: delta=2\.0; use a float above 0 and below 1"):
        og.drift.ADWIN(delta=2.0)
