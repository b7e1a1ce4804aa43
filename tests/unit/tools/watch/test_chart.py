"""Curves for a reader."""

from __future__ import annotations

import math

import pytest

from outergrad.tools.watch.picture import BLOCKS, chart


def test_a_curve_rises_with_its_values():
    assert chart(range(8), 8) == [BLOCKS]
    assert chart(range(8), 10) == [BLOCKS + "  "]


def test_more_values_than_columns_are_averaged():
    assert chart([0, 0, 7, 7], 2) == ["▁█"]


def test_a_higher_curve_stands_on_its_lowest_line():
    rows = chart(range(16), 16, height=2)
    assert rows == [" " * 8 + BLOCKS, BLOCKS + "█" * 8]


@pytest.mark.parametrize("values", [[], [3.0], [2.0] * 50, [math.nan], [1.0, math.inf, 2.0]])
@pytest.mark.parametrize("height", [1, 3])
@pytest.mark.parametrize("width", [0, 1, 7, 60])
def test_any_values_give_lines_of_the_width(values, width, height):
    assert [len(row) for row in chart(values, width, height)] == [width] * height


def test_what_is_no_number_is_a_gap():
    assert chart([0.0, math.nan, 7.0], 3) == ["▁ █"]


def test_what_hardly_changes_looks_like_it():
    assert chart([1.00, 1.01], 2) == ["▁█"]
    assert {*chart([1.00, 1.01], 2, least_span=0.25)[0]} <= {"▄", "▅"}
    assert chart([5.0, 5.0], 2, low=0.0) == ["██"]
