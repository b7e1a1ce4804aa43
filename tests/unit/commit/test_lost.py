from __future__ import annotations

import pytest

from outergrad.comm.failure_report import FailureReport
from outergrad.commit.lost import awaited_by, late_sites, lost_of


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


def in_sum(waited_s, *, sent=True, timed_out=False):
    """The word of a site in an all-reduce, where nobody knows for whom it waits."""
    return FailureReport(4, made=4, sent=sent, waited_s=waited_s, timed_out=timed_out)


@pytest.mark.parametrize(
    ("third", "lost"),
    [
        (in_sum(0.0, sent=False), (2,)),  # it computed
        (in_sum(0.0), (2,)),  # it stood still while it sent its part
        (in_sum(1.4), ()),  # a line is cut: it has waited like the others
    ],
)
def test_who_was_late_in_a_sum(third, lost):
    found = {0: in_sum(1.5, timed_out=True), 1: in_sum(1.4), 2: third}
    assert lost_of(0, found, set()) == lost_of(1, found, set()) == lost
    assert awaited_by(2, found) == ((0,) if lost else ())
    assert awaited_by(1, found) == ()


def test_a_site_that_waits_for_votes_is_not_late_in_a_sum():
    found = {0: in_sum(1.5, sent=False, timed_out=True), 1: in_sum(1.4, sent=False), 2: in_sum(0.0)}
    assert lost_of(0, found, set()) == lost_of(1, found, set()) == (2,)
    del found[2]
    assert lost_of(0, found, set()) == (1,)  # nobody else has not sent
