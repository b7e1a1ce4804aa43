"""What sites leave for each other is read whatever stands there."""

from __future__ import annotations

import json
import random
import string

import pytest

from outergrad.comm.failure_report import LONGEST_WHY, FailureReport, LastStep, printable

FULL = FailureReport(
    step=7,
    session=(1 << 62) - 1,
    voted=True,
    silent=(0, 3),
    gone=(2,),
    waited_s=1.5,
    ends={5: LastStep(7, True), (1 << 62) - 1: LastStep(8, False)},
    why="ValueError: no more rows",
    timed_out=True,
    ended="process",
    settled=True,
)
ODD = [None, True, -1, 1 << 64, 1.5, float("nan"), "x", "", [], [1, 2], [[-1]], {}, {"a": 1}]


@pytest.mark.parametrize("standing", [FailureReport(0), FULL])
def test_what_is_left_is_what_is_read(standing):
    assert FailureReport.of(standing.text()) == standing


@pytest.mark.parametrize("name", vars(FULL))
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_a_field_of_another_kind_is_refused_or_read_as_it_is(name, value):
    found = FailureReport.of(json.dumps({**json.loads(FULL.text()), name: value}))
    assert found is None or json.loads(found.text())[name] == value


def test_arbitrary_texts_raise_nothing():
    dice, text = random.Random(0), FULL.text()
    for _ in range(3000):
        cut = list(text)
        for _ in range(dice.randrange(1, 6)):
            cut[dice.randrange(len(cut))] = dice.choice(string.printable + "\0é")
        mixed = "".join(cut)[: dice.randrange(2 * len(cut))]
        found = FailureReport.of(mixed)
        assert found is None or FailureReport.of(found.text()) == found
    for odd in ["", "null", "[]", "1e999", "[" * 100_000, '{"a":' * 3000, "9" * 5000, "x" * 10**6]:
        assert FailureReport.of(odd) is None


def test_an_error_is_one_short_line():
    assert printable("a\n\x1b[31mb\tc\0") == "a [31mb c"
    assert printable("  " + "long " * 1000) == ("long " * 1000)[: LONGEST_WHY - 3] + "..."
