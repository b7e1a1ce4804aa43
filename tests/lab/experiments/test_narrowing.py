"""A part of an experiment, run from the command line, and what is said of the rest."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from outergrad.launch.errors import RecipeError
from outergrad.tools.commands.app import app
from outergrad_lab.experiments.narrowing import Part
from outergrad_lab.experiments.quantities import NOTHING
from outergrad_lab.experiments.spec import experiment

YAML = """
title: Digits
shows: that parts run
claim: none
minutes: 1
sweep: lr
common: {data: digits, split: class, batch_size: 16, tests: 2, sites: 2}
small: {steps: 9, seed: [0, 1]}
full: {epochs: 1, seed: 0}
workloads:
  narrow: {model: mlp, widths: [8]}
  wide: {model: mlp, small: {widths: [64], steps: 7}}
  large: {model: mlp, widths: [999], full: {}}
runs:
  - {method: [ddp, "og-powersgd:rank=4"], lr: [0.001, 0.01]}
  - {method: "rank-dad:rank=2", lr: [0.001, 0.01], workloads: [narrow], small: {lr: 0.01}}
tables:
  - {name: verdict, best: lr, against: {reference: "og-powersgd:rank=4"}, rows: family,
     columns: [workload, sites], value: [bytes_share]}
"""


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(YAML)
    return path


def cases(found):
    names = ("workload", "method", "lr", "seed", "steps")
    return {tuple(task.settings.get(name) for name in names) for task in found.tasks}


def test_workloads_have_sizes_and_entries_choose_among_them(written):
    small, full = experiment(str(written)), experiment(str(written), full=True)
    assert len(small.tasks) == 2 * 2 * 2 * 2 + 2
    assert small.runs == 2 * 2 * (2 + 1) + 2
    assert ("wide", "ddp", 0.01, 1, 7) in cases(small)
    assert {workload for workload, *_ in cases(full)} == {"narrow", "large"}


def test_a_part_is_what_fits_every_setting_that_is_named(written):
    whole = experiment(str(written))
    found = Part(only=("narrow", "ddp", "rank-dad:rank=2", "lr=0.01"), seeds=1, steps=3).of(whole)
    assert cases(found) == {("narrow", m, 0.01, 0, 3) for m in ("ddp", "rank-dad:rank=2")}
    assert found.command.endswith("--only rank-dad:rank=2 --only lr=0.01 --seeds 1 --steps 3")
    assert Part().of(whole).tasks == whole.tasks


def test_a_workload_may_have_the_name_of_its_model(tmp_path):
    (path := tmp_path / "mine.yaml").write_text(YAML.replace("narrow", "mlp"))
    found = Part(only=("mlp", "wide", "ddp", "lr=0.01"), seeds=1, steps=3).of(experiment(str(path)))
    assert cases(found) == {(w, "ddp", 0.01, 0, 3) for w in ("mlp", "wide")}


@pytest.mark.parametrize(
    ("only", "said"),
    [
        (
            ("2",),
            "--only 2 is a value of several settings; write --only sites=2 or --only tests=2$",
        ),
        (
            ("narow",),
            "--only narow: no run has a setting of that value; workloads are narrow, wide",
        ),
        (("wide", "rank-dad:rank=2"), "no run has all of these"),
    ],
)
def test_what_there_is_not_is_refused(written, only, said):
    with pytest.raises(RecipeError, match=said):
        Part(only=only).of(experiment(str(written)))


def invoke(*args):
    return CliRunner().invoke(app, ["reproduce", *map(str, args)])


def test_it_goes_on_where_it_stopped_and_says_what_has_not_run(written, tmp_path):
    out = tmp_path / "out"
    part = ["--only", "narrow", "--only", "ddp", "--steps", "4"]
    first = invoke(written, "--out", out, *part, "--only", "0.01", "--seeds", "1")
    assert first.exit_code == 0, first.output
    assert first.stdout.splitlines()[-1].startswith("mine: 1 runs, ")
    again = invoke(written, "--out", out, *part)
    assert again.exit_code == 0, again.output
    assert again.stdout.splitlines()[-1].startswith("mine: 3 runs, 1 of them earlier, ")
    narrow, wide = (out / "mine" / "runs.md").read_text().splitlines()[4:]
    assert narrow.startswith("| narrow | 2 | 4 of 9 | 0, 1 of 0, 1 | 0.001, 0.01 of 0.001, 0.01 |")
    assert "| 1 of 3 | PowerSGD, rank 4; rank-dAD, rank 2 |" in narrow
    assert wide.startswith(f"| wide | 2 | {NOTHING} of 7 |")
    assert "| 0 of 2 | all |" in wide


def test_a_method_that_does_not_fit_is_left_out_and_named(written, tmp_path):
    text = YAML.replace('"og-powersgd:rank=4"', '"rank-dad:budget=100"')
    written.write_text(text.replace("lr: [0.001, 0.01]", "lr: 0.01"))
    out = tmp_path / "out"
    part = ["--only", "wide", "--steps", "2", "--seeds", "1", "--out", out]
    found = invoke(written, *part)
    assert found.exit_code == 0, found.output
    assert "left out: training: " in found.stderr
    assert "budget=100 is 100 bytes per step" in found.stderr
    assert len((out / "mine" / "results.jsonl").read_text().splitlines()) == 1
    assert "rank-dAD, budget = 100" in (out / "mine" / "runs.md").read_text()


def test_if_nothing_runs_the_mistake_is_told(written, tmp_path):
    written.write_text(YAML.replace("data: digits", "data: spoken-digits").replace("mlp", "gru"))
    found = invoke(written, "--out", tmp_path / "out", "--only", "narrow", "--data-dir", tmp_path)
    assert found.exit_code == 2
    assert "spoken-digits is not there" in found.stderr
