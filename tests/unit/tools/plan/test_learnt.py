"""Information that a method gives to others, summed up over a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outergrad.record.coverage import Coverage, Travel
from outergrad.tools.plan.learnt import NOTHING, learnt_by_others

words = st.sampled_from([NOTHING, "the mean gradient", "this site's gradient", "rows"])
lines = st.tuples(st.integers(1, 10**6), words)


def coverage(*numbers_and_words: tuple[int, str]) -> Coverage:
    return Coverage(
        tuple(
            Travel("w", (number, 1), "dense", "", reveals) for number, reveals in numbers_and_words
        )
    )


def test_one_kind_is_named_alone():
    assert learnt_by_others(coverage((8, "rows"), (3, "rows"), (5, NOTHING))) == "rows"
    assert learnt_by_others(coverage((5, NOTHING))) == NOTHING


def test_several_kinds_are_named_with_their_shares():
    assert learnt_by_others(coverage((37, "this site's gradient"), (63, "rows"))) == (
        "rows (63% of the weights); this site's gradient (37%)"
    )
    assert learnt_by_others(coverage((1, "this site's gradient"), (999, "rows"))) == (
        "rows (more than 99% of the weights); this site's gradient (less than 1%)"
    )


@given(st.lists(lines, min_size=1, max_size=8))
def test_all_that_is_learnt_is_named_and_nothing_is_hidden(numbers_and_words):
    told = learnt_by_others(coverage(*numbers_and_words))
    for _, reveals in numbers_and_words:
        assert reveals in told or reveals == NOTHING
    assert "(0%" not in told
    assert "(100%" not in told
