"""Gaps over that of a reference, and bytes to a loss, of courses that nobody ran."""

from __future__ import annotations

import math

import pytest
from made_up_results import a_test, training

pytest.importorskip("pandas")

from outergrad.launch.errors import RecipeError
from outergrad_lab.experiments.asked import ask
from outergrad_lab.experiments.tables import verdicts, write_tables

AGAINST = {"reference": "og-powersgd:rank=4", "within": 0.1}


def run(method, losses, nbytes, *, seed=0, workload="gpt", **settings):
    """Tested at each 10th step; so many bytes per step."""
    tests = [a_test(10 * k, 10 * k * nbytes, loss=loss) for k, loss in enumerate(losses, 1)]
    own = {"workload": workload, "method": method, "seed": seed, "lr": 0.1}
    return training([1.0] * 10 * len(losses), tests=tests, **(own | settings)) | {"compute_s": 0.5}


RESULTS = [
    run("ddp", [4.0, 3.0, 2.0], 1000),
    run("og-powersgd:rank=4", [4.0, 3.5, 3.0], 100),
    run("og-powersgd:rank=8", [4.0, 3.0, 2.5], 200),
    run("rank-dad:budget=1/64", [4.0, 3.0, 2.3], 50, seed=0),
    run("rank-dad:budget=1/64", [4.0, 3.0, 2.1], 50, seed=1),
    run("rank-dad:budget=1/8", [2.5, 2.1, 2.0], 150),
    run("demo", [4.0, 3.9, 3.8], 10),
    run("powersgd-4", [4.0, 3.9, 3.8], None or math.nan),
]


def by(rows, results=RESULTS):
    frame = verdicts(results, AGAINST, by_family=rows == "family")
    return {row[rows]: row for row in frame.to_dict("records")}


def test_of_each_method():
    found = by("method")
    assert "powersgd-4" not in found  # nobody counts its bytes
    own = found["rank-dad:budget=1/64"]
    assert own["test_loss"] == pytest.approx(2.2)
    assert own["loss_gap"] == pytest.approx(0.2)
    assert own["gap_share"] == pytest.approx(0.2)
    assert own["bytes_share"] == pytest.approx(1000 / 3000)  # a loss of 3 after 20 steps
    assert own["steps_to"] == pytest.approx(20)
    assert own["fewer_near"] == pytest.approx(30 * 1000 / (30 * 50))
    assert found["ddp"]["gap_share"] == 0
    assert (
        found["og-powersgd:rank=4"]["gap_share"] == found["og-powersgd:rank=4"]["bytes_share"] == 1
    )
    assert math.isnan(found["demo"]["bytes_share"])
    assert math.isnan(found["demo"]["fewer_near"])


def test_between_two_tests_a_loss_is_on_the_line():
    found = by("method")["rank-dad:budget=1/8"]
    near = 150 * 10 * (1 + (2.5 - 2.2) / (2.5 - 2.1))
    assert found["fewer_near"] == pytest.approx(30_000 / near)
    assert found["bytes_share"] == pytest.approx(1500 / 3000)  # at the first test already


def test_a_loss_that_is_left_again_is_not_reached():
    lucky = run("rank-dad:budget=1/64", [2.0, 2.6, 2.1, 2.0], 50)
    late = run("demo", [2.0, 3.1, 3.0, 3.3], 10)
    found = by("method", [*RESULTS[:2], lucky, late])
    near = 50 * 10 * (2 + (2.6 - 2.2) / (2.6 - 2.1))
    assert found["rank-dad:budget=1/64"]["fewer_near"] == pytest.approx(30_000 / near)
    assert math.isnan(found["demo"]["bytes_share"])


def test_of_a_family_the_best_at_no_more_bytes_and_the_fewest_to_a_loss():
    found = by("family")
    assert found["rank-dad"]["gap_share"] == pytest.approx(0.2)  # not that of 150 bytes per step
    assert found["rank-dad"]["sent_bytes"] == pytest.approx(50)
    assert found["rank-dad"]["bytes_share"] == pytest.approx(1 / 3)
    assert math.isnan(found["ddp"]["gap_share"])  # it sends more
    assert found["og-powersgd"]["gap_share"] == 1


def test_a_family_is_told_by_methods_with_as_many_seeds_as_the_reference():
    again = [run("og-powersgd:rank=4", [4.0, 3.5, 3.0], 100, seed=1)]
    found = by("family", [*RESULTS, *again])
    assert found["rank-dad"]["test_loss"] == pytest.approx(2.2)
    assert not {"ddp", "demo"} & found.keys()
    assert {"ddp", "demo"} <= by("method", [*RESULTS, *again]).keys()


def test_without_the_reference_there_is_nothing_to_say(tmp_path):
    others = [r for r in RESULTS if r["settings"]["method"] != "og-powersgd:rank=4"]
    assert verdicts(others, AGAINST).empty
    wanted = {"name": "verdict", "against": AGAINST, "rows": "family", "value": ["gap_share"]}
    assert not write_tables([{**wanted, "columns": ["workload", "sites"]}], others, tmp_path)


def test_in_a_table_the_best_rate_counts(tmp_path):
    worse = [run("ddp", [9.0, 9.0, 9.0], 1000, lr=0.2)]
    wanted = {"name": "verdict", "best": "lr", "against": AGAINST, "rows": "family"}
    wanted |= {"columns": ["workload", "sites"], "value": ["gap_share", "fewer_near"]}
    (table,) = write_tables([wanted], RESULTS + worse, tmp_path)
    assert ["rank-dAD", "0.20", "20.0\N{MULTIPLICATION SIGN}"] in table.rows
    assert list(table.cells.columns)[1].startswith("gpt, 2 sites, ")
    wanted |= {"rows": ["workload", "sites"], "columns": "family", "value": "gap_share"}
    (table,) = write_tables([wanted], RESULTS + worse, tmp_path)
    best = dict(zip(table.cells.columns, *table.rows, strict=True))
    assert (best["rank-dAD"], best["PowerSGD"]) == ("0.20", "1.00")


def test_seconds_over_a_link_are_computing_and_bytes_over_its_rate():
    wanted = {"name": "seconds", "x": "seconds", "y": "test_loss", "lines": "method"}
    asked = ask({**wanted, "links": ["10mbit", "1mbit"], "panels": "link"}, RESULTS)
    points = asked.points[(asked.points["method"] == "ddp") & (asked.points["step"] == 20)]
    found = dict(zip(points["link"], points["seconds"], strict=True))
    assert found == {
        "10mbit": pytest.approx(20 * (0.5 + 8 * 1000 / 10e6)),
        "1mbit": pytest.approx(20 * (0.5 + 8 * 1000 / 1e6)),
    }


def test_of_seeds_the_one_with_the_least_computing_tells_the_seconds():
    slow = [run("demo", [4.0, 3.9], 10, seed=1) | {"compute_s": 0.75}]
    wanted = {"name": "seconds", "x": "seconds", "y": "test_loss", "lines": "method"}
    wanted |= {"links": ["1mbit"], "panels": "link"}
    points = ask(wanted, [*RESULTS, *slow]).points
    points = points[(points["method"] == "demo") & (points["step"] == 20)]
    assert len(points) == 2
    assert points["seconds"].to_list() == pytest.approx([20 * (0.5 + 8 * 10 / 1e6)] * 2)
    asked = ask(wanted, [run("ddp", [4.0], 1) | {"compute_s": s} for s in (0.75, 0.5)])
    assert asked.points["seconds"].to_list() == pytest.approx([10 * (0.5 + 8 / 1e6)] * 2)


def test_over_a_link_computing_and_bytes_until_nearly_denses_loss_take_time():
    slower = [result | {"compute_s": 9.0} for result in RESULTS]  # beside other programs
    asked = {**AGAINST, "links": ["1mbit", "10kbit"]}
    for found in (verdicts(RESULTS, asked), verdicts([*slower, *RESULTS], asked)):
        rows = {(row["method"], row["link"]): row["seconds_near"] for _, row in found.iterrows()}
        assert rows["rank-dad:budget=1/64", "1mbit"] == pytest.approx(30 * (0.5 + 8 * 50 / 1e6))
        assert rows["rank-dad:budget=1/64", "10kbit"] == pytest.approx(30 * (0.5 + 8 * 50 / 1e4))
        assert math.isnan(rows["demo", "1mbit"])


def test_a_link_without_a_rate_is_refused():
    with pytest.raises(RecipeError, match="has no rate"):
        verdicts(RESULTS, {**AGAINST, "links": ["none"]})
