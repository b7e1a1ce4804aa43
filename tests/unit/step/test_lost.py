from __future__ import annotations

import pytest

from outergrad.step.lost import late_sites


@pytest.mark.parametrize(
    ("silent", "late"),
    [
        ({0: [2], 1: [2], 2: [1]}, {2}),  # 2 stood still, and found 1 late when it went on
        ({0: [2], 1: [], 2: []}, {2}),
        ({0: [1], 1: [0]}, {0, 1}),  # a line is cut: each has waited for the other
        ({0: [1, 2], 1: [], 2: []}, {1, 2}),
        ({0: [], 1: []}, set()),
    ],
)
def test_who_was_late_by_what_sites_have_waited_for(silent, late):
    assert late_sites(silent) == late
