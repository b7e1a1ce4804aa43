"""Amounts for a reader."""

from __future__ import annotations

import math

import pytest

from outergrad._amounts import amount, duration, many, milliseconds, plain, seconds, short, times

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
    (amount(1000), "1 kB"),
    (amount(12_345), "12.3 kB"),
    (amount(2.5e9), "2.5 GB"),
    (amount(2.5e15), "2.5e+03 TB"),
    (amount(-36_700), "-36.7 kB"),
    (amount(6_922, ""), "6.92 k"),
    (times(3.14), "3.1"),
    (times(86.2), "86"),
    (times(1234.0), "1,234"),
    (milliseconds(8e-4), "0.8"),
    (milliseconds(0.0123), "12.3"),
    (milliseconds(1.25), "1,250"),
    (duration(0.2), "0 s"),
    (duration(-3), "0 s"),
    (duration(59.9), "59 s"),
    (duration(126), "2m 06s"),
    (duration(3720), "1h 02m"),
    (duration(86400 * 3 + 4 * 3600), "3d 04h"),
    (seconds(8.5e-4), "850 µs"),
    (seconds(0.0123), "12.3 ms"),
    (seconds(0.5), "500 ms"),
    (seconds(1.25), "1.25 s"),
    (seconds(2.0), "2 s"),
    (seconds(0.00123, times), "1.2 ms"),
    (seconds(0.2, times), "200 ms"),
    (seconds(3.61, times), "3.6 s"),
    (seconds(34.2, times), "34 s"),
    (amount(96.4e6, "bit/s", times), "96 Mbit/s"),
    (amount(9.64e6, "bit/s", times), "9.6 Mbit/s"),
    (amount(1.25e9, "bit/s", times), "1.2 Gbit/s"),
    (amount(955e3, "bit/s", times), "955 kbit/s"),
    (many(1, "core"), "1 core"),
    (many(2, "core"), "2 cores"),
]


@pytest.mark.parametrize(("written", "expected"), WRITTEN)
def test_written(written, expected):
    assert written == expected
