"""Figures of trainings without a centre on docs/gossip.md are those of the experiment's results."""

from __future__ import annotations

import json
from functools import cache
from statistics import fmean

import pytest

from outergrad_lab.experiments.gossip import exchanges
from outergrad_lab.experiments.spec import experiment
from outergrad_lab.experiments.tables import write_tables
from places import REPOSITORY

FOLDER = REPOSITORY / "experiments" / "results" / "gossip"
PAGE = (REPOSITORY / "docs" / "gossip.md").read_text()
RELATED = (REPOSITORY / "docs" / "related.md").read_text()


@cache
def results() -> list[dict]:
    return [json.loads(line) for line in (FOLDER / "results.jsonl").read_text().splitlines()]


def mean(value: str, told: str, data: str = "mnist", split: str = "even", rate: str = "") -> float:
    """Over the seeds, of which there are three."""
    wanted = {"data": data} | ({"split": split} if data == "mnist" else {})
    wanted |= {"optimizer": rate} if rate else {}
    found = [
        one["rows"][0][value]
        for one in results()
        if one["settings"].items() >= wanted.items() and exchanges(one["settings"]) == told
    ]
    assert len(found) == 3
    return fmean(found)


def test_every_task_of_the_experiment_has_a_result():
    assert {one["key"] for one in results()} == {t.key for t in experiment("gossip").tasks}


@pytest.mark.parametrize("name", ["accuracy", "loss"])
def test_tables_are_those_of_the_results(name, tmp_path):
    tables = [one for one in experiment("gossip").tables if one["name"] == name]
    (table,) = write_tables(tables, results(), tmp_path)
    assert table.markdown == (FOLDER / f"{name}.md").read_text()
    assert table.markdown.partition("\n\n")[2] in PAGE
