"""Experiments are read from YAML; each mistake is named."""

from __future__ import annotations

import pytest

from outergrad.launch.errors import RecipeError
from outergrad_lab.experiments.spec import experiment, names

TEXT = """
title: Digits
shows: that it
  works
claim: none
minutes: 2
common: {data: digits, batch_size: 16}
small: {steps: 5, seed: [0, 1]}
full: {epochs: 2, seed: [0, 1, 2]}
runs:
  - {widths: [8, 8], sites: [2, 3], method: [dad, alone]}
  - {widths: [8, 8], sites: 2, method: dad}
"""


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_lists_are_crossed_and_each_task_is_there_once(written) -> None:
    found = experiment(written(TEXT))
    settings = [
        (t.settings["seed"], t.settings["sites"], t.settings["method"]) for t in found.tasks
    ]
    assert len(found.tasks) == len(set(settings)) == 8
    assert all(task.settings["widths"] == [8, 8] for task in found.tasks)
    assert (found.name, found.shows, found.size) == ("mine", "that it works", "small")
    assert len({task.key for task in found.tasks}) == 8


def test_an_entry_may_have_sizes_of_its_own(written) -> None:
    text = TEXT.replace("sites: 2, method: dad}", "sites: 2, method: dad, small: {steps: 7}}")
    small, full = experiment(written(text)), experiment(written(text), full=True)
    assert sorted(task.settings["steps"] for task in small.tasks) == [5] * 8 + [7] * 2
    assert {task.settings["epochs"] for task in full.tasks} == {2}


def test_the_full_size_is_another(written) -> None:
    found = experiment(written(TEXT), full=True)
    assert len(found.tasks) == 12
    assert {task.settings["epochs"] for task in found.tasks} == {2}
    assert not {task.key for task in found.tasks} & {t.key for t in experiment(written(TEXT)).tasks}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("title: Digits", "heading: Digits"), "no part 'heading'"),
        (("title: Digits", "title: 3"), "title must be a text"),
        (("runs:", "tables:"), "runs: there are none"),
        (("seed: [0, 1]", "sead: 0"), "no setting 'sead'"),
        (("steps: 5", "steps: 0"), "steps must be a whole number of 1 or more"),
        (("steps: 5, ", ""), "give either steps or epochs"),
        (("method: dad}", "method: dat}"), "must be one of"),
        (("sites: 2,", "kind: nothing, sites: 2,"), "no kind 'nothing'"),
        (("minutes: 2", "minutes: [2"), "mine.yaml: "),
    ],
)
def test_mistakes_are_named_with_the_file(written, change, expected) -> None:
    with pytest.raises(RecipeError, match=r"^mine\.yaml: ") as error:
        experiment(written(TEXT.replace(*change)))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_not_there_is_told_with_what_is() -> None:
    with pytest.raises(RecipeError, match=r"no experiment 'mnist': there are .*mnist-mlp"):
        experiment("mnist")


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", names())
def test_every_experiment_of_the_project_can_be_read(name, full) -> None:
    found = experiment(name, full=full)
    assert found.tasks
    assert found.tables
    assert found.figures
    assert 0 < found.minutes <= 20
