"""`outergrad reproduce` as a user meets it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from typer.testing import CliRunner

from full_disk import longest_file
from outergrad.tools.commands.app import app
from outergrad_lab.experiments.spec import names

YAML = """
title: Digits
shows: that the command works
claim: none
minutes: 1
common: {data: digits, widths: [16], split: class, batch_size: 16, tests: 2}
small: {steps: STEPS, seed: [0, 1]}
full: {epochs: 1, seed: 0}
runs:
  - {method: [pooled, dad, "rank-dad:rank=2"]}
tables:
  - {name: accuracy, title: Test accuracy, rows: method, value: [accuracy, gap]}
figures:
  - {name: loss, title: Training loss, x: step, y: loss, lines: method}
"""


def invoke(*args: str):
    return CliRunner().invoke(app, ["reproduce", *map(str, args)])


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(YAML.replace("STEPS", "4"))
    return path


@pytest.mark.slow
def test_an_experiment_runs_once_and_is_drawn_as_often_as_wanted(written, tmp_path) -> None:
    out = tmp_path / "out"
    first = invoke(written, "--out", out)
    assert first.exit_code == 0, first.output
    assert first.stdout.splitlines()[-1].startswith("mine: 6 runs, ")
    assert "6/6 " in first.stderr
    folder = out / "mine"
    files = {path.name for path in folder.iterdir()} - {"results.lock"}
    assert files == {"results.jsonl", "accuracy.csv", "accuracy.md", "loss.png", "report.html"}
    results = (folder / "results.jsonl").read_text()

    before = {path: path.read_bytes() for path in folder.iterdir()}
    with longest_file(10):
        full = invoke(written, "--out", out, "--draw")
    assert full.exit_code == 2
    assert full.stderr == f"outergrad: --out {folder / 'accuracy.csv'}: File too large\n"
    assert {path: path.read_bytes() for path in folder.iterdir()} == before

    again = invoke(written, "--out", out)
    assert again.stdout.splitlines()[-1].startswith("mine: 6 runs, 6 of them earlier, ")
    assert (folder / "results.jsonl").read_text() == results

    (folder / "report.html").unlink()
    drawn = invoke(written, "--out", out, "--draw")
    assert drawn.stdout.replace("\n", "") == str(folder / "report.html")
    assert (folder / "report.html").is_file()


@pytest.mark.slow
def test_an_interrupt_is_told_and_leaves_nothing_half_done(tmp_path) -> None:
    path, folder = tmp_path / "mine.yaml", tmp_path / "out" / "mine"
    command = [sys.executable, "-m", "outergrad", "reproduce", path, "--out", folder.parent]
    path.write_text(YAML.replace("STEPS", "1000000").replace("pooled, ", ""))
    # A test run in the background ignores interrupts, and so would what it starts.
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    options = {"stderr": subprocess.PIPE, "text": True, "preexec_fn": heed}
    with subprocess.Popen(command, **options) as process:
        try:
            while not (folder / "results.lock").exists():
                assert process.poll() is None
                time.sleep(0.05)
            time.sleep(2)  # in a training, or on the way to it
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()  # or it would train beside all other tests
    assert process.returncode == 130
    assert said.strip().splitlines()[-1] == "outergrad: interrupted"
    assert not (folder / "results.jsonl").exists()


def test_the_list_says_what_each_shows() -> None:
    listed = invoke("--list")
    assert listed.exit_code == 0
    assert all(name in listed.stdout for name in names())
    assert invoke().stdout == listed.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nothing"], "outergrad: no experiment 'nothing': there are audit, autospec, "),
        (["mnist-mlp", "--data-dir", "nowhere"], "outergrad data get mnist"),
    ],
)
def test_a_mistake_is_one_line(args, said, tmp_path) -> None:
    result = invoke(*args, "--out", tmp_path)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.strip().count("\n") == 0


def test_a_folder_that_cannot_be_written_is_named(written) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    result = invoke(written, "--out", "/proc/nothing")
    assert result.exit_code == 2
    assert "--out" in result.stderr
