"""Trainings that stop and go on: in threads, and killed as processes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from full_disk import longest_file
from outergrad.launch.errors import RecipeError
from outergrad.tools.commands.app import app
from outergrad_lab.training.job import Job
from outergrad_lab.training.saving import Saving
from outergrad_lab.training.train import Files, train
from ranks import run_ranks, try_ranks

JOB = Job(
    data="digits", method="rank-dad:rank=2", widths=(24,), epochs=2, batch_size=60, split="unequal"
)


def trained(job: Job, log: Path, saving: Saving | None = None, present=None, record=None) -> bool:
    sites = job.sites if present is None else len(present)
    files = Files(log=log, record=record)

    def body(rank, group):
        return train(job, data_dir=Path(), files=files, group=group, saving=saving, present=present)

    (done,) = {*run_ranks(sites, body)}
    return done


def told(log: Path) -> list[dict]:
    job, *epochs = [json.loads(line) for line in log.read_text().splitlines()]
    assert job["method"] == JOB.method
    return [{**epoch, "seconds": 0} for epoch in epochs]


def in_pieces(job: Job, folder: Path, every: int) -> int:
    """Stops after every checkpoint; how many pieces it took."""
    saving = Saving(folder=folder / "saved", every=every, pause_after=1)
    pieces = 1
    while not trained(job, folder / "log", saving):
        pieces += 1
    return pieces


@pytest.mark.parametrize("method", ["rank-dad:rank=2", "local-steps:k=3", "ddp", "dad:every=3"])
def test_a_training_in_pieces_is_the_same(method, tmp_path, capsys):
    job = replace(JOB, method=method)
    assert trained(job, tmp_path / "whole")
    whole = [json.loads(line) for line in (tmp_path / "whole").read_text().splitlines()]
    steps = whole[-1]["step"]
    assert in_pieces(job, tmp_path, every=10) == steps // 10 + (steps % 10 > 0)
    found = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    for expected, line in zip(whole, found, strict=True):
        for name in expected.keys() - {"seconds", "sent_bytes"}:
            assert line[name] == expected[name], name
    for expected, line in zip(whole[1:], found[1:], strict=True):
        assert line["sent_bytes"] == pytest.approx(expected["sent_bytes"], rel=0.1)
    assert "going on after step 10" in capsys.readouterr().err


def test_a_finished_training_tells_its_result_again(tmp_path, capsys):
    saving = Saving(folder=tmp_path / "saved")
    for _ in range(2):
        assert trained(JOB, tmp_path / "log", saving)
    lines = capsys.readouterr().out.splitlines()
    first, second = [line for line in lines if "test accuracy" in line]
    assert first.rsplit(",", 1)[0] == second.rsplit(",", 1)[0]
    assert len(told(tmp_path / "log")) == 2
    longer = replace(JOB, epochs=3)
    assert trained(longer, tmp_path / "log", saving)
    assert [line["epoch"] for line in told(tmp_path / "log")] == [1, 2, 3]
    with pytest.raises(RecipeError, match="has done"):
        trained(replace(JOB, epochs=1), tmp_path / "log", saving)


def test_a_lost_site_is_left_out_with_its_rows_and_comes_back(tmp_path, caplog):
    job = replace(JOB, sites=3, batch_size=30, epochs=2)
    saving = Saving(folder=tmp_path / "saved", every=4, allow_lost=True)
    paused = replace(saving, pause_after=1)
    record = tmp_path / "run"
    assert not trained(job, tmp_path / "log", paused, record=record)
    assert not trained(job, tmp_path / "log", paused, present=(0, 2), record=record)
    assert "saved by 3 sites, at 2" in caplog.text
    assert trained(job, tmp_path / "log", saving, record=record)
    assert "saved by 2 sites, at 3" in caplog.text
    assert "site 1: new" in caplog.text
    assert len(told(tmp_path / "log")) == 2
    steps = [lines(record / f"site-{site}.jsonl") for site in range(3)]
    assert steps[0] == steps[2]
    assert {*steps[0]} - {*steps[1]} == {5, 6, 7, 8}


def lines(path: Path) -> list[int]:
    """Steps whose loss a site wrote down."""
    found = map(json.loads, path.read_text().splitlines())
    return [line["step"] for line in found if "loss" in line.get("values", {})]


def test_another_number_of_sites_goes_on_after_the_same_share_of_an_epoch(tmp_path, caplog):
    saving = Saving(folder=tmp_path / "saved", every=5, pause_after=1)
    assert not trained(JOB, tmp_path / "log", saving)
    assert trained(replace(JOB, sites=3), tmp_path / "log", replace(saving, pause_after=None))
    assert "saved by 2 sites, at 3" in caplog.text
    assert [line["epoch"] for line in told(tmp_path / "log")] == [1, 2]


def test_the_folder_of_another_job_is_refused(tmp_path):
    saving = Saving(folder=tmp_path / "saved", every=5, pause_after=1)
    trained(JOB, tmp_path / "log", saving)
    with pytest.raises(RecipeError, match=r"holds another job: --lr was 0\.001 and is 0\.5; name"):
        trained(replace(JOB, lr=0.5), tmp_path / "log", saving)


REFUSED = {
    "no folder": (["--max-restarts", "1"], "need --checkpoint FOLDER"),
    "threads": (["--max-restarts", "1", "--checkpoint", "x", "--simulate"], "not --simulate"),
    "few": (["--min-sites", "3", "--checkpoint", "x"], "from 1 to the 2 sites"),
    "hook": (["--checkpoint", "x", "--method", "powersgd-2"], "use og-powersgd"),
    "pooled": (["--checkpoint", "x", "--min-sites", "1", "--method", "pooled"], "does not go"),
}


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=REFUSED)
def test_options_that_do_not_go_together(options, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", *options])
    assert result.exit_code == 2
    assert said in result.stderr


def test_torchrun_does_the_restarts_itself(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["train", "--max-restarts", "1"])
    assert "torchrun --max-restarts N" in result.stderr


def run(*options: object):
    fixed = ["train", "--widths", "24", "--batch-size", "60", "--simulate"]
    return CliRunner().invoke(app, [*fixed, *map(str, options)])


def damaged(folder: Path, name: str) -> list[Path]:
    """Replaces a file of every checkpoint by a link to nowhere."""
    paths = sorted(folder.glob(f"step-*/{name}"))
    for path in paths:
        path.unlink()
        path.symlink_to("/nowhere")
    return paths


def test_checkpoints_that_cannot_be_read_end_the_command_and_stay(tmp_path):
    saved, log = tmp_path / "saved", tmp_path / "log"
    options = ["--checkpoint", saved, "--checkpoint-every", 5, "--log", log]
    assert run("--epochs", 1, *options).exit_code == 0
    paths = damaged(saved, "shared-0.pt")
    assert len(paths) == 2
    there, said = sorted(saved.rglob("*")), log.read_text()
    result = run("--epochs", 2, *options)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"outergrad: --checkpoint {saved} cannot be gone on from")
    assert all(f"{path} cannot be read" in result.stderr for path in paths)
    assert "move the folder away to begin anew" in result.stderr
    assert "step 0" not in result.stdout
    assert sorted(saved.rglob("*")) == there
    assert log.read_text() == said


def test_files_of_a_site_that_are_lost_are_gone_on_without_if_that_is_said(tmp_path):
    options = ["--checkpoint", tmp_path / "saved", "--epochs", 2]
    assert run(*options).exit_code == 0
    damaged(tmp_path / "saved", "site-1.pt")
    result = run(*options)
    assert result.exit_code == 2
    assert "; --allow-lost goes on with what there is" in result.stderr
    assert run(*options, "--allow-lost").exit_code == 0


def test_a_folder_on_which_one_site_sees_nothing_empties_no_log(tmp_path):
    """Site 0, which writes the log, has lost its disk."""
    log = tmp_path / "log"

    def body(rank, group):
        saving = Saving(folder=tmp_path / str(rank), every=5)
        return train(JOB, data_dir=Path(), files=Files(log=log), group=group, saving=saving)

    assert run_ranks(2, body) == [True, True]
    said = log.read_text()
    shutil.rmtree(tmp_path / "0")
    for error in try_ranks(2, body):
        assert isinstance(error, RecipeError)
        assert "; --allow-lost goes on with what there is" in str(error)
    assert log.read_text() == said


@pytest.mark.parametrize("content", ["", "{", "7", "\x00"])
def test_a_job_that_cannot_be_read_is_refused(content, tmp_path):
    saving = Saving(folder=tmp_path / "saved", every=5, pause_after=1)
    trained(JOB, tmp_path / "log", saving)
    (tmp_path / "saved" / "job.json").write_text(content)
    with pytest.raises(RecipeError, match=r"job\.json cannot be read"):
        trained(JOB, tmp_path / "log", saving)


def test_a_folder_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "saved").touch()
    for folder in (tmp_path / "saved", tmp_path / "saved" / "below"):
        with pytest.raises(RecipeError, match=r"--checkpoint .*saved.*: (File exists|Not a dir)"):
            trained(JOB, tmp_path / "log", Saving(folder=folder))


def test_a_checkpoint_that_does_not_fit_is_one_line_and_leaves_no_half(tmp_path):
    with longest_file(20_000):
        result = run("--checkpoint", tmp_path / "saved", "--epochs", 1)
    assert result.exit_code == 1
    assert "File too large" in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["job.json"]
