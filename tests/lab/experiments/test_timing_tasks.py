"""Tasks that time steps on a shaped link."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outergrad.launch import links
from outergrad.launch.errors import RecipeError
from outergrad.launch.links import ShapedLink, what_is_missing
from outergrad_lab.experiments.kinds import TimingWork
from outergrad_lab.experiments.task import Context, read

MISSING = what_is_missing(ShapedLink(rate_bit_per_s=1e8), 2)
SETTINGS = {"workload": "deep-mlp", "sites": 2, "link": "100mbit", "methods": ["ddp", "dad"]}
REFUSED = [
    ({"workload": "huge"}, "--model must be"),
    ({"sites": 1}, "sites must be a whole number of 2"),
    ({"sites": "2"}, "sites must be a whole number"),
    ({"link": "fast"}, "--link 'fast'"),
    ({"rtt": "4"}, "--latency '4'"),
    ({"methods": "ddp"}, "methods must be a list"),
    ({"methods": []}, "--methods"),
    ({"methods": ["magic"]}, "magic"),
    ({"seconds": 0}, "seconds must be a number above 0"),
    ({"steps": 3}, "no setting 'steps'"),
]


@pytest.mark.parametrize(("changed", "said"), REFUSED)
def test_a_wrong_setting_is_refused_by_name(changed, said):
    with pytest.raises(RecipeError, match=said):
        read(TimingWork, {**SETTINGS, "optional": True, **changed})


def test_a_missing_setting_is_named():
    with pytest.raises(RecipeError, match=r"methods is missing"):
        read(TimingWork, {name: SETTINGS[name] for name in ("workload", "sites", "link")})


def test_a_machine_that_cannot_shape_links_says_what_it_lacks(monkeypatch):
    monkeypatch.setattr(links.os, "geteuid", lambda: 1000)
    with pytest.raises(RecipeError, match=r"needs root.*optional: true"):
        read(TimingWork, SETTINGS)


def test_an_optional_task_is_left_out_there(monkeypatch):
    monkeypatch.setattr(links.os, "geteuid", lambda: 1000)
    settings, done = {**SETTINGS, "optional": True}, []
    context = Context(data_dir=Path(), advance=lambda: done.append(1))
    found = read(TimingWork, settings).run(context)
    assert "needs root" in found["skipped"]
    assert "steps" not in found
    assert done == [1]


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_steps_are_timed_on_the_link(tmp_path, capfd):
    settings = {**SETTINGS, "seconds": 1}
    found = read(TimingWork, settings).run(Context(data_dir=tmp_path))
    assert json.loads(json.dumps(found)) == found
    assert list(found["steps"]) == SETTINGS["methods"]
    for step in found["steps"].values():
        low, high = step["quartiles_s"]
        assert low <= step["step_s"] <= high
        assert step["step_s"] > 0.98 * step["payload_bytes"] * 8 / 1e8
    assert found["steps"]["ddp"]["sent_bytes"] > found["steps"]["dad"]["sent_bytes"]
    assert not capfd.readouterr().out
