"""Results are kept, found again, and survive a line that was cut off."""

from __future__ import annotations

import json
import math

import pytest

from outergrad.launch.errors import RecipeError
from outergrad_lab.experiments.run import Store
from outergrad_lab.experiments.task import Task

TASKS = [Task(kind="training", settings={"seed": seed}) for seed in range(3)]


def test_what_is_done_is_not_missing(tmp_path) -> None:
    store = Store(tmp_path / "new")
    assert store.missing(TASKS) == TASKS
    store.add(TASKS[1], {"losses": [1 / 3, math.nan], "tests": ({"auc": None},), "seconds": 1.0})
    assert Store(tmp_path / "new").missing(TASKS) == [TASKS[0], TASKS[2]]
    (found,) = store.results(TASKS)
    assert found["losses"] == [0.3333333333, None]
    assert found["settings"] == {"seed": 1}
    assert {"torch", "outergrad", "machine", "finished"} <= found.keys()


def test_results_come_in_the_order_of_the_tasks(tmp_path) -> None:
    store = Store(tmp_path)
    for task in reversed(TASKS):
        store.add(task, {"seconds": 1.0})
    assert [found["settings"]["seed"] for found in store.results(TASKS)] == [0, 1, 2]


def test_a_line_that_was_cut_off_is_run_again(tmp_path) -> None:
    store = Store(tmp_path)
    store.add(TASKS[0], {"losses": [1.0], "seconds": 1.0})
    store.add(TASKS[1], {"losses": [1.0], "seconds": 1.0})
    path = tmp_path / "results.jsonl"
    path.write_text(path.read_text()[:-30])
    assert store.missing(TASKS) == [TASKS[1], TASKS[2]]
    store.add(TASKS[1], {"losses": [2.0], "seconds": 1.0})
    assert [found["losses"] for found in store.results(TASKS)] == [[1.0], [2.0]]


def test_other_settings_are_another_task() -> None:
    keys = {Task(kind=kind, settings={"x": x}).key for kind in ("a", "b") for x in (1, "1", None)}
    assert len(keys) == 6
    assert json.dumps({"b": 1, "a": 2}) != json.dumps({"a": 2, "b": 1})
    same = [Task(kind="a", settings=s).key for s in ({"b": 1, "a": 2}, {"a": 2, "b": 1})]
    assert same[0] == same[1]


def test_two_processes_do_not_run_the_same(tmp_path) -> None:
    second = Store(tmp_path).locked()
    with (
        Store(tmp_path).locked(),
        pytest.raises(RecipeError, match="another process runs it there"),
    ):
        second.__enter__()
    with Store(tmp_path).locked():
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"--out .*file"):
        Store(tmp_path / "file" / "x").add(TASKS[0], {})
