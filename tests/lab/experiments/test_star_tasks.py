"""Tasks that time steps around a hub."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outergrad.launch import links
from outergrad.launch.errors import RecipeError
from outergrad.launch.links import ShapedLink, what_is_missing
from outergrad.tools.commands.app import app
from outergrad_lab.bench.around_hub import Rounds, combined
from outergrad_lab.experiments.kinds import KINDS
from outergrad_lab.experiments.spec import experiment
from outergrad_lab.experiments.task import Context

MISSING = what_is_missing(ShapedLink(rate_bit_per_s=1e8, rtt_s=0.01), 3)
SETTINGS = {
    "data": "digits",
    "widths": [16],
    "sites": 2,
    "steps": 8,
    "link": "20mbit",
    "rtt": "10ms",
    "methods": ["ddp", "dense", "fedavg:k=4"],
    "seconds": 0.3,
}
REFUSED = [
    ({"link": "fast"}, "--link 'fast'"),
    ({"hub_rate": "fast"}, "--link 'fast'"),
    ({"methods": ["magic"]}, "magic"),
    ({"methods": ["alone"]}, "methods must be those"),
    ({"methods": []}, "methods must be those"),
    ({"data": "huge"}, "--data"),
]


@pytest.mark.parametrize(("changed", "said"), REFUSED)
def test_a_wrong_setting_is_refused_by_name(changed, said):
    with pytest.raises(RecipeError, match=said):
        KINDS["star"]({**SETTINGS, **changed})


def test_a_machine_that_cannot_shape_links_says_what_it_lacks(monkeypatch):
    monkeypatch.setattr(links.os, "geteuid", lambda: 1000)
    found = KINDS["star"](SETTINGS).run(Context(data_dir=Path()))
    assert "needs root" in found["skipped"]
    assert "steps" not in found


def test_a_round_is_over_when_the_last_site_has_made_it():
    first = Rounds(2, [1.0, 3.0, 4.0], 600, 60, undisturbed=2, disturbed_s=9.0)
    second = replace(first, ends_s=[2.0, 2.5, 6.0], sent_bytes=0, disturbed_s=8.0)
    found = combined([first, second])
    assert found["step_s"] == pytest.approx(2.0 / 2)  # rounds of 2, 1 and 3 seconds
    assert (found["sent_bytes"], found["received_bytes"]) == (50, 10)
    assert found["cut_s"] == pytest.approx(9.0 - 2 * 2.0)
    assert combined([replace(first, undisturbed=0)])["cut_s"] is None


def test_a_consortium_compares_what_it_trains_and_times_it():
    found = experiment("consortium")
    trained = {t.settings["method"] for t in found.tasks if t.settings.get("seed") == 2}
    timed: dict[tuple[str, str], set[str]] = {}
    for settings in [task.settings for task in found.tasks if task.kind == "star"]:
        place = settings["workload"], settings["link"]
        timed.setdefault(place, set()).update(settings["methods"])
    assert len(timed) == 4
    assert all(trained == methods for methods in timed.values())
    around = [table["around"] for table in found.tables if "around" in table]
    assert all(method in trained for one in around for method in one["reference"].values())


@pytest.mark.slow
def test_the_command_runs_a_part_without_a_link(tmp_path, data_dir, monkeypatch):
    monkeypatch.setattr(links.os, "geteuid", lambda: 1000)
    wanted = ["method=fedavg:k=5", "x-rays", "lr=0.001"]
    options = [part for one in wanted for part in ("--only", one)]
    options += ["--steps", "5", "--seeds", "1", "--out", tmp_path, "--data-dir", data_dir]
    command = ["reproduce", "consortium", *map(str, options)]
    for said in ("consortium: 1 runs, ", "consortium: 1 runs, 1 of them earlier"):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        assert said in done.stdout
    found = (tmp_path / "consortium" / "hours.md").read_text()
    assert "planned" in found
    assert "measured" not in found


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_steps_and_a_cut_are_timed_around_a_hub(tmp_path):
    found = KINDS["star"]({**SETTINGS, "cut_s": 1.0}).run(Context(data_dir=tmp_path))["steps"]
    assert json.loads(json.dumps(found)) == found
    assert list(found) == SETTINGS["methods"]
    model_bytes = 4 * (64 * 16 + 16 + 16 * 10 + 10)
    assert model_bytes < found["dense"]["sent_bytes"] < 3 * model_bytes
    assert found["dense"]["sent_bytes"] > 2 * found["fedavg:k=4"]["sent_bytes"]
    assert found["dense"]["step_s"] > 0.01 > 0
    assert found["ddp"]["cut_s"] is None
    assert found["dense"]["cut_s"] > 0.5
