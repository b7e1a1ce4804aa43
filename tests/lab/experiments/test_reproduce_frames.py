"""Results become tables; every expectation is computed by hand."""

from __future__ import annotations

import math

import pytest
from made_up_results import a_test, iterations, of_sites, timing, training

pytest.importorskip("pandas")

from outergrad_lab.experiments.frames import (
    MEASURED,
    curves,
    finals,
    over_seeds,
    per_site,
    ranks,
    varied,
)

POOLED = training([2.0, 1.0], method="pooled")
NEAR = training([2.0, 1.25], method="rank-dad:rank=8")


def row(frame, **values):
    """The only row with these values."""
    for name, value in values.items():
        frame = frame[frame[name] == value]
    assert len(frame) == 1
    return frame.iloc[0]


def test_finals_of_a_training():
    losses = [9.0] * 10 + [2.0] * 10 + [1.0] * 10
    found = row(finals([training(losses, method="rank-dad:rank=8", widths=[64, 32])]))
    assert (found["family"], found["rank"], found["label"]) == ("rank-dad", 8, "rank-dAD, rank 8")
    assert found["train_loss"] == 1.5  # of the last 20 steps
    assert (found["test_loss"], found["accuracy"]) == (0.5, 0.9)
    assert math.isnan(found["auc"])
    assert (found["total_bytes"], found["sent_bytes"]) == (30_000, 1000)
    assert (found["widths"], found["sites"], found["data"]) == ("64, 32", 2, "mnist")


def test_the_gap_is_the_largest_difference_at_any_step():
    frame = finals([POOLED, NEAR, training([5.0, 1.0], method="alone")])
    assert frame["gap"].tolist() == [0, 0.25, 3]


@pytest.mark.parametrize("change", [{"seed": 1}, {"sites": 3}, {"lr": 0.1}])
def test_only_a_pooled_training_of_the_same_settings_is_compared(change):
    frame = finals([POOLED, training([2.0, 1.0], method="dad", **change)])
    assert frame["gap"].isna().tolist() == [False, True]


def test_a_loss_that_is_no_number_is_infinitely_far():
    assert finals([POOLED, training([2.0, math.nan])])["gap"].tolist() == [0, math.inf]


@pytest.mark.parametrize("order", [1, -1])
def test_fewer_bytes_than_dense_else_than_ddp(order):
    both = timing({"ddp": (0.1, 8000), "dense": (0.1, 6000), "dad": (0.1, 2000)}, link="1gbit")
    one = timing({"ddp": (0.1, 8000), "dad": (0.1, 2000), "alone": (0.1, 0)}, link="10mbit")
    frame = finals([both, one][::order])
    assert row(frame, link="1gbit", method="dad")["fewer"] == 3
    assert row(frame, link="10mbit", method="dad")["fewer"] == 4
    assert math.isnan(row(frame, link="10mbit", method="alone")["fewer"])


def test_bytes_are_compared_at_as_many_sites():
    found = [of_sites(m, n, b * n, 0.1) for n in (2, 4) for m, b in (("dense", 90), ("dad", 30))]
    assert finals(found)["fewer"].tolist() == [1, 3, 1, 3]


def test_finals_of_all_kinds_have_the_same_columns():
    kinds = [POOLED, timing(), of_sites("dad", 2, 10, 0.5), iterations(("a", 4, 1, 0.5))]
    frame = finals(kinds)
    assert {*MEASURED, "method", "family", "rank", "label", "seed"} <= set(frame.columns)
    assert len(frame) == 5
    assert row(frame, kind="timing", method="dad")["step_s"] == 0.05
    assert row(frame, kind="sites")["compute_s"] == 0.25
    found = row(frame, kind="iterations")
    assert (found["layer"], found["rank"], found["iterations"], found["error"]) == ("a", 4, 1, 0.5)
    for one in kinds:
        assert set(MEASURED) <= set(finals([one]).columns)


def test_nothing_makes_empty_tables():
    for frame in (finals([]), curves([]), ranks([]), per_site([])):
        assert frame.empty


def test_curves_say_what_was_sent_in_between():
    frame = curves([training([4.0, 3.0, 2.0, 1.0], tests=[a_test(2, 100), a_test(4, 400)])])
    assert frame["step"].tolist() == [1, 2, 3, 4]
    assert frame["loss"].tolist() == [4, 3, 2, 1]
    assert frame["sent_bytes"].tolist() == [50, 100, 250, 400]
    assert frame["accuracy"].isna().tolist() == [True, False, True, False]
    assert frame["seconds"].isna().all()


def test_curves_of_what_nobody_counted():
    assert curves([training(tests=[a_test(2, None)])])["sent_bytes"].isna().all()


def test_a_test_before_the_first_step_has_no_loss():
    frame = curves([training([4.0], tests=[a_test(0, 0), a_test(1, 10)])])
    assert frame["step"].tolist() == [0, 1]
    assert frame["loss"].isna().tolist() == [True, False]


def test_seconds_are_those_of_the_method_with_as_many_sites():
    trained = [training(method=m, sites=n) for m in ("dad", "alone") for n in (2, 3)]
    frame = curves([*trained, timing({"dad": (0.05, 1)})])
    timed = frame[frame["seconds"].notna()]
    assert set(timed["method"]) == {"dad"}
    assert set(timed["sites"]) == {2}
    assert timed["seconds"].tolist() == [0.05, 0.1]


def test_each_link_has_its_own_seconds():
    links = [timing({"dad": (s, 1)}, link=name) for name, s in (("1gbit", 0.1), ("10mbit", 2.0))]
    frame = curves([training([1.0]), *links])
    assert dict(zip(frame["link"], frame["seconds"], strict=True)) == {"1gbit": 0.1, "10mbit": 2}


@pytest.mark.parametrize(("epochs", "expected"), [(2, [0, 1]), (None, [None, None])])
def test_ranks_of_layers(epochs, expected):
    points = [{"step": 0, "effective_rank": 9.0}, {"step": 2, "effective_rank": 5.0}]
    settings = {"epochs": epochs} if epochs else {}
    trained = training([4.0, 3.0, 2.0, 1.0], layers={"a": points, "b": points}, **settings)
    frame = ranks([trained, POOLED])
    assert frame["layer"].tolist() == ["a", "a", "b", "b"]
    assert frame["effective_rank"].tolist() == [9, 5, 9, 5]
    assert [None if e != e else e for e in frame["epoch"][:2]] == expected


def test_a_row_per_site():
    by_site = [{"loss": 0.1, "accuracy": 0.9, "auc": None}, {"loss": 0.3, "accuracy": 0.7}]
    frame = per_site([training(by_site=by_site), POOLED])
    assert frame["site"].tolist() == [0, 1]
    assert frame["accuracy"].tolist() == [0.9, 0.7]
    assert frame["loss"].tolist() == [0.1, 0.3]


def test_over_seeds():
    tests = [[{**a_test(1, 1, accuracy=a)}] for a in (0.5, 0.75, 0.25)]
    frame = finals([training([1.0], tests=t, seed=n) for n, t in enumerate(tests)])
    found = row(over_seeds(frame, ["method"], "accuracy"))
    assert found[["mean", "min", "max", "count"]].tolist() == [0.5, 0.25, 0.75, 3]


def test_what_differs():
    trained = [
        training(method=m, seed=s, sites=n)
        for m in ("dad", "rank-dad-2")
        for n in (2, 3)
        for s in (0, 1)
    ]
    assert varied(finals(trained)) == ["method", "sites"]
