"""``train`` from end to end, at two sites."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from forked import forked_processes
from outergrad.launch.start import run_sites
from outergrad_lab.data import missing_files
from outergrad_lab.training.job import Job
from outergrad_lab.training.train import Files, train
from small_files import write

pytestmark = pytest.mark.slow

JOBS = [
    Job(data="cifar10", model="cnn", method="dad", epochs=2, batch_size=6),
    Job(data="cifar10", model="cnn", method="ddp", epochs=1, batch_size=6),
    Job(data="cifar10", model="vit", method="dad", epochs=1, batch_size=6),
    Job(data="natops", model="lstm", method="powersgd-2", epochs=2, batch_size=4),
    Job(data="tinyshakespeare", model="gpt", method="dense", epochs=1, batch_size=4),
    Job(data="imdb", model="encoder", method="dad", epochs=1, batch_size=4, widths=(16,)),
    Job(data="spoken-digits", model="gru", method="ddp", split="speaker", batch_size=2, epochs=1),
    Job(data="natops", model="mlp", method="local-steps:k=2", split="unequal", batch_size=3),
]


def train_all(data_dir: Path) -> None:
    """What each site does: one training after another."""
    for number, job in enumerate(JOBS):
        train(job, data_dir=data_dir, files=Files(log=data_dir / f"{number}.log"))


def events(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_every_kind_of_data_can_be_trained_on(tmp_path):
    for name in {job.data for job in JOBS}:
        write(name, tmp_path)
    with forked_processes(tmp_path / "shown"):
        run_sites(partial(train_all, tmp_path), 2)
    told = (tmp_path / "shown").read_text().splitlines()
    lines = [line for line in told if " on " in line]
    assert told.count("Nothing was recorded; to look inside, add --record runs/first.") == len(JOBS)
    assert [line.split(",")[0] for line in lines] == [f"{j.method} on {j.data}" for j in JOBS]
    for number, job in enumerate(JOBS):
        told, *epochs = events(tmp_path / f"{number}.log")
        assert told["data"] == job.data
        assert len(epochs) == job.epochs
        uncounted = job.method == "powersgd-2"
        assert (epochs[-1]["sent_bytes"] is None) == uncounted
        assert ("bytes not counted" in lines[number]) == uncounted


def test_a_gru_learns_spoken_digits(data_dir, tmp_path):
    if missing := missing_files("spoken-digits", data_dir):
        pytest.skip(f"no {', '.join(missing)} in {data_dir}")
    job = Job(data="spoken-digits", model="gru", epochs=1, lr=5e-3)
    with forked_processes():
        run_sites(partial(train, job, data_dir=data_dir, files=Files(log=tmp_path / "log")), 2)
    (*_, last) = events(tmp_path / "log")
    assert last["test_accuracy"] > 0.5
