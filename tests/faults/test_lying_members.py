"""A site of a star that lies on the board: the others never end apart silently, and none hangs."""

from __future__ import annotations

import os

import pytest
from liars import LIES, draw

from covering import LONG, covering

TRIALS = 5000 if LONG else 240
SEED = int(os.environ.get("OUTERGRAD_FAULT_SEED", "0"))
_AT_ONCE = 20


@pytest.mark.parametrize("first", covering(range(0, TRIALS, _AT_ONCE), quick=3))
def test_no_lie_makes_the_others_differ_silently(first):
    for number in range(first, first + _AT_ONCE):
        trial = draw(number, SEED)
        assert not trial.complaints(), f"trial {number}: {trial.lies}: {trial.complaints()}"


@pytest.mark.slow
def test_each_lie_is_told_and_some_are_refused():
    """The trials are what they are meant to be."""
    trials = [draw(number, SEED) for number in range(3 * len(LIES))]
    assert {name for trial in trials for name in trial.lies} == set(LIES)
    assert sum(bool(trial.refused) for trial in trials) > len(trials) // 8
    deceived = [
        trial
        for trial in trials
        if any("what cannot be" in h.outcome.findings.doubt for h in trial.honest)
    ]
    assert len(deceived) > 5
    assert any(h.outcome.content for trial in trials for h in trial.honest)
    assert any(h.outcome.goes_on for trial in trials for h in trial.honest)
