"""Intervals of measured amounts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outergrad.tools.plan.interval import EVEN, FEWEST, UNKNOWN, Interval

amounts = st.floats(1e-4, 1e4)
intervals = st.tuples(amounts, amounts).map(lambda pair: Interval(min(pair), max(pair)))


@given(intervals)
def test_rounding_goes_outward_and_keeps_three_digits(one):
    shown = one.outward()
    assert shown.low <= one.low * (1 + 1e-6)
    assert shown.high >= one.high * (1 - 1e-6)
    assert shown.low >= one.low * 0.989
    assert shown.high <= one.high * 1.011


@given(intervals, intervals)
def test_what_is_below_is_below_in_every_case(one, other):
    if one.is_below(other):
        assert one.high * (1 + EVEN) < other.low
        assert not other.is_below(one)
        assert one.over(other).high < 1 / (1 + EVEN) + 1e-9
    assert not one.is_below(one)


@given(st.lists(intervals, min_size=FEWEST, max_size=40))
def test_an_interval_lies_within_the_samples(samples):
    found, whole = Interval.of(samples), Interval.around(samples)
    assert whole.low <= found.low <= found.high <= whole.high


@given(st.lists(intervals, min_size=1, max_size=FEWEST - 1))
def test_few_samples_are_in_doubt(samples):
    found, whole = Interval.of(samples), Interval.around(samples)
    assert found == Interval(whole.low / UNKNOWN, whole.high * UNKNOWN)


@pytest.mark.parametrize("count", [8, 12, 20, 50])
def test_an_interval_misses_the_median_in_one_of_a_hundred_cases(count):
    draw = random.Random(count)
    missed = 0
    for _ in range(4000):
        samples = [draw.lognormvariate(0, 0.3) for _ in range(count)]
        found = Interval.of([Interval(one, one) for one in samples])
        missed += not found.low <= 1 <= found.high
    assert missed <= 4000 * 0.015


def test_more_samples_narrow_it():
    draw = random.Random(0)
    samples = [Interval(x, x) for x in (draw.lognormvariate(0, 0.3) for _ in range(60))]
    assert Interval.of(samples).over(Interval(1, 1)).high < Interval.around(samples).high / 1.3
