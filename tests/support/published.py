"""Published results of experiments, and the tables that are made of them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from outergrad_lab.experiments.spec import experiment
from outergrad_lab.experiments.tables import write_tables
from places import REPOSITORY

FOLDER = REPOSITORY / "experiments" / "results"


@cache
def results(name: str) -> list[dict]:
    """Results of an experiment's tasks."""
    lines = (FOLDER / name / "results.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def assert_each_task_has_a_result(name: str) -> None:
    """No task of the experiment is missing or there twice, and no result is of another task."""
    keys = sorted(one["key"] for one in results(name))
    assert keys == sorted(task.key for task in experiment(name).tasks)


def assert_tables_are_those_of_the_results(name: str, folder: Path) -> None:
    """Those that are published are what a reproduction writes, to the letter."""
    whole = experiment(name)
    found = {one["key"]: one for one in results(name)}
    ordered = [found[task.key] for task in whole.tasks]  # as a reproduction has them
    written = {t.name: t.markdown for t in write_tables(whole.tables, ordered, folder)}
    assert written == {table: markdown(name, table) for table in written}


def markdown(name: str, table: str) -> str:
    """A published table, with its title."""
    return (FOLDER / name / f"{table}.md").read_text()


def body(name: str, table: str) -> str:
    """A published table without its title."""
    return markdown(name, table).partition("\n\n")[2]


def cells(name: str, table: str, *key: str) -> dict[str, str]:
    """The cells of the row whose first ones are the key, by column."""
    columns, _, *rows = (line.strip("| ").split(" | ") for line in body(name, table).splitlines())
    (found,) = (row for row in rows if tuple(row[: len(key)]) == key)
    return dict(zip(columns, found, strict=True))


def mean_of(cell: str) -> str:
    """A cell without its range: "24 %" of "24 % [23, 25]"."""
    return cell.partition(" [")[0]
