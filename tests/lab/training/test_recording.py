"""What trainings of recipes write down, whatever their method."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from forked import forked_processes
from outergrad.launch.errors import RecipeError
from outergrad.launch.start import run_sites
from outergrad_lab.training.job import Job
from outergrad_lab.training.recording import recorder_into
from outergrad_lab.training.train import Files, train

METHODS = {"pooled": 1, "ddp": 2, "alone": 2, "rank-dad-4": 2, "dad": 1}
"""And at how many sites they run."""


def lines(folder: Path, site: int = 0) -> list[dict]:
    return [json.loads(line) for line in (folder / f"site-{site}.jsonl").read_text().splitlines()]


def train_all(sites: int, folder: Path) -> None:
    for method in [name for name, processes in METHODS.items() if processes == sites]:
        job = Job(method=method, epochs=1, widths=(32,), sites=sites)
        train(job, data_dir=folder, files=Files(record=folder / method, every=4))


@pytest.mark.slow
@pytest.mark.parametrize("sites", [1, 2])
def test_every_training_can_be_compared(sites, tmp_path):
    with forked_processes():
        run_sites(partial(train_all, sites, tmp_path), sites)
    for method in [name for name, processes in METHODS.items() if processes == sites]:
        for site in range(sites):
            found = lines(tmp_path / method, site)
            assert found[0]["event"] == "run"
            assert found[0]["sites"] == sites
            scalars = [line["values"] for line in found if line["event"] == "scalars"]
            steps = [line for line in found if line["event"] == "step"]
            losses = [values for values in scalars if "loss" in values]
            assert len(losses) > 10
            assert scalars[-1]["accuracy"] > 0.2
            assert [step["step"] for step in steps] == list(range(0, len(losses), 4))
            shares = sites > 1 and method != "alone"
            assert (steps[-1]["sent_bytes"] > 0) == shares
            measured = [line for line in found if line["event"] == "layer"]
            assert bool(measured) == (method in ("rank-dad-4", "dad"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path, one_site):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RecipeError, match=f"--record {folder}"):
            recorder_into(folder, 1)


def test_an_earlier_run_is_replaced(tmp_path, one_site):
    (tmp_path / "site-0.jsonl").write_text("old\n")
    recorder_into(tmp_path, 1).close()
    assert not (tmp_path / "site-0.jsonl").read_text()
