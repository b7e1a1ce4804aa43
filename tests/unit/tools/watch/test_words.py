"""Numbers and curves for a reader."""

from __future__ import annotations

import math

import pytest

from outergrad.tools.watch.words import BLOCKS, amount, chart, duration, plain, seconds, short

WRITTEN = [
    (short(0.0), "0.00"),
    (short(4.1234), "4.12"),
    (short(0.0412), "0.0412"),
    (short(41234.0), "41,234"),
    (short(4.1e-5), "4.1e-05"),
    (short(math.nan), "nan"),
    (plain(0.43123), "0.4312"),
    (plain(1e-3), "0.001"),
    (plain(math.inf), "inf"),
    (plain(41234.0), "41,234"),
    (amount(0), "0 B"),
    (amount(999), "999 B"),
    (amount(999.9), "1 kB"),
    (amount(12_345), "12.3 kB"),
    (amount(2.5e9), "2.5 GB"),
    (amount(2.5e15), "2.5e+03 TB"),
    (duration(0.2), "0 s"),
    (duration(-3), "0 s"),
    (duration(59.9), "59 s"),
    (duration(126), "2m 06s"),
    (duration(3720), "1h 02m"),
    (duration(86400 * 3 + 4 * 3600), "3d 04h"),
    (seconds(8.5e-4), "850 µs"),
    (seconds(0.0123), "12.3 ms"),
    (seconds(1.25), "1.25 s"),
]


@pytest.mark.parametrize(("written", "expected"), WRITTEN)
def test_written(written, expected):
    assert written == expected


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
