"""Tables: every number in full for programs, short for humans."""

from __future__ import annotations

import csv

import pytest
from made_up_results import a_test, iterations, timing, training

pytest.importorskip("pandas")

from outergrad.launch.errors import RecipeError
from outergrad_lab.experiments.figures import write_figures
from outergrad_lab.experiments.quantities import NOTHING
from outergrad_lab.experiments.tables import write_tables


def trained(accuracy, **settings):
    return training([1.0], tests=[a_test(1, 1_500_000, accuracy=accuracy)], **settings)


RESULTS = [
    *(trained(a, method="pooled", seed=s) for s, a in enumerate((0.9, 1 / 3))),
    *(trained(0.5, method="dad", seed=s) for s in (0, 1)),
    trained(0.25, method="dad", sites=3),
    timing({"dad": (0.02, 99)}),
]


def one(folder, results=RESULTS, **wanted):
    """The only table."""
    usual = {"name": "found", "title": "Title", "rows": "method", "value": "accuracy"}
    (table,) = write_tables([usual | wanted], results, folder)
    return table


def heads(table):
    return list(table.cells.columns)


def lines(folder):
    with (folder / "found.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_for_humans(tmp_path):
    table = one(tmp_path, columns="sites")
    assert heads(table) == ["method", "2 sites", "3 sites"]
    assert table.rows == [
        ["pooled", "61.7 % [33.3, 90.0]", NOTHING],
        ["dAD", "50.0 %", "25.0 %"],
    ]
    assert (tmp_path / "found.md").read_text().splitlines() == [
        "**Title**",
        "",
        "| method | 2 sites | 3 sites |",
        "| --- | ---: | ---: |",
        f"| pooled | 61.7 % [33.3, 90.0] | {NOTHING} |",
        "| dAD | 50.0 % | 25.0 % |",
    ]


def test_for_programs(tmp_path):
    one(tmp_path, columns="sites")
    first, second, third = lines(tmp_path)
    assert list(first) == ["method", "sites", "value", "mean", "min", "max", "count"]
    assert (first["method"], first["sites"], first["value"]) == ("pooled", "2", "accuracy")
    assert float(first["mean"]) == (0.9 + 1 / 3) / 2
    assert (float(first["min"]), float(first["max"]), first["count"]) == (1 / 3, 0.9, "2")
    assert (second["count"], third["count"]) == ("2", "1")


def test_what_differs_besides_is_told_apart_for_programs(tmp_path):
    one(tmp_path, over="sites")
    assert [(line["method"], line["sites"]) for line in lines(tmp_path)] == [
        ("pooled", "2"),
        ("dad", "2"),
        ("dad", "3"),
    ]


def test_a_column_for_each_value(tmp_path):
    table = one(tmp_path, over="sites", value=["accuracy", "sent_bytes", "step_s"])
    assert heads(table) == ["method", "test accuracy", "sent per step and site", "time of a step"]
    assert table.rows[1][1:] == ["41.7 % [25.0, 50.0]", "1.50 MB", "20.0 ms"]
    assert {line["value"] for line in lines(tmp_path)} == {"accuracy", "sent_bytes", "step_s"}


def test_values_under_columns(tmp_path):
    table = one(tmp_path, columns="sites", value=["accuracy", "gap"])
    assert heads(table)[1:3] == [
        "2 sites, test accuracy",
        "2 sites, largest loss difference to pooled",
    ]


def test_several_names_in_a_row_and_rising_numbers(tmp_path):
    rows = [("b", 8, 1, 0.5), ("b", 2, 1, 1e-5), ("a", 16, 1, 0.25)]
    table = one(tmp_path, [iterations(*rows)], rows=["layer", "rank"], value="error")
    assert table.rows == [
        ["b", "2", "1.0e-05"],
        ["b", "8", "0.5"],
        ["a", "16", "0.25"],
    ]


def test_a_row_for_each_site(tmp_path):
    by_site = [{"loss": 0.5, "accuracy": a, "auc": 0.75} for a in (0.1, 0.2)]
    result = training(by_site=by_site)
    table = one(tmp_path, [result], rows=["method", "site"], value=["accuracy", "auc", "test_loss"])
    assert table.rows == [
        ["dAD", "0", "10.0 %", "0.750", "0.500"],
        ["dAD", "1", "20.0 %", "0.750", "0.500"],
    ]


def test_a_method_without_rank_is_no_row_of_ranks(tmp_path):
    results = [trained(0.5, method="pooled"), trained(0.5, method="rank-dad:rank=8")]
    table = one(tmp_path, results, rows="rank", columns="family")
    assert heads(table) == ["rank", "rank-dAD"]
    assert table.rows == [["8", "50.0 %"]]


def test_what_nobody_measured_makes_an_empty_table(tmp_path):
    assert one(tmp_path, value="kept_rank").rows == []
    assert lines(tmp_path) == []


def test_an_unknown_name_is_told(tmp_path):
    with pytest.raises(RecipeError, match=r"table found: there is no 'colour' .* accuracy"):
        one(tmp_path, rows="colour")


def test_a_bar_in_a_cell_does_not_end_it(tmp_path):
    table = one(tmp_path, [trained(0.5, method="a|b")])
    assert "| a\\|b |" in table.markdown


@pytest.mark.parametrize("write", [write_tables, write_figures])
def test_what_to_install_is_told(tmp_path, monkeypatch, write):
    monkeypatch.setattr("outergrad.core.packages.is_installed", lambda name: False)
    with pytest.raises(ImportError, match=r"pandas.* not found: pip install 'pandas>="):
        write([], [], tmp_path)


def test_a_cell_is_no_mean_over_what_the_table_does_not_say(tmp_path):
    found = [trained(0.5, lr=lr) for lr in (0.1, 0.2)]
    with pytest.raises(RecipeError, match="a cell would be a mean over lr"):
        one(tmp_path, found)
    for more in ({"over": "lr"}, {"where": {"lr": 0.1}}, {"columns": "lr"}):
        assert one(tmp_path, found, **more).rows


def test_a_table_is_of_the_part_that_it_asks_for(tmp_path):
    found = [trained(0.5, method=m, sites=s) for m in ("dad", "dense") for s in (2, 3)]
    table = one(tmp_path, found, rows="method", columns="sites", where={"sites": 3})
    assert heads(table) == ["method", "3 sites"]
    both = one(tmp_path, found, rows="method", columns="sites", where={"sites": [2, 3]})
    assert heads(both) == ["method", "2 sites", "3 sites"]
    with pytest.raises(RecipeError, match="there is no 'site s'"):
        one(tmp_path, found, where={"site s": 3})
