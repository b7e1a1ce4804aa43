"""Checkpoints of earlier versions are gone on from; `write_old_checkpoints.py` has written them."""

from __future__ import annotations

import json
import shutil

import pytest
from write_old_checkpoints import OLD, SAVED, STEPS

from ranks import run_on_lasting_groups
from sites_that_save import METHODS, Site


@pytest.mark.parametrize("name", METHODS)
def test_training_goes_on_as_it_did(name, tmp_path):
    folder = shutil.copytree(OLD / name, tmp_path / "saved")
    expected = json.loads((folder / "losses.json").read_text())

    def body(rank, group):
        site = Site(METHODS[name], rank, group, folder)
        return list(site.run(STEPS, STEPS + 1).items())

    for found, then in zip(run_on_lasting_groups(2, body), expected, strict=True):
        assert [step for step, _ in found] == list(range(SAVED, STEPS))
        assert [loss for _, loss in found] == pytest.approx(then, rel=1e-5)
