"""Tasks that look for the largest entries of a gradient."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outergrad.launch.errors import RecipeError
from outergrad_lab.data import synthetic
from outergrad_lab.experiments import capture as captures
from outergrad_lab.experiments import iterations, selection
from outergrad_lab.experiments.capture import capture
from outergrad_lab.experiments.selection import WAYS, SelectionWork, heavy_tailed
from outergrad_lab.experiments.task import Context, read
from outergrad_lab.workloads import WORKLOADS

DRAWN = {"drawn": 20_000, "density": 0.01}
TRAINED = {"workload": "mlp", "batch_size": 4, "steps": 5, "density": 0.1}
REFUSED = [
    ({**DRAWN, "workload": "mlp"}, "give either workload or drawn"),
    ({"density": 0.1}, "give either workload or drawn"),
    ({**TRAINED, "workload": "gpt"}, "workload must be one of mlp"),
    ({**DRAWN, "density": 1.5}, "density must be at most 1"),
    ({**DRAWN, "density": 0.0}, "density must be a number above 0"),
    ({**DRAWN, "drawn": 0}, "drawn must be a whole number of 1"),
]


@pytest.fixture(autouse=True)
def made_up_data(monkeypatch):
    """A small model, data that needs no files, and one measurement each."""
    small = {"mlp": replace(WORKLOADS["mlp"], widths=(24,))}
    monkeypatch.setattr(captures, "WORKLOADS", small)
    monkeypatch.setattr(captures, "load", lambda *_: synthetic(small["mlp"].format, 8, seed=0))
    monkeypatch.setattr(iterations, "REPEATS", (1, 1))
    monkeypatch.setattr(selection, "LEAST_NUMEL", 1000)
    capture.cache_clear()
    yield
    capture.cache_clear()


@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_a_wrong_setting_is_refused_by_name(settings, said):
    with pytest.raises(RecipeError, match=said):
        read(SelectionWork, settings)


@pytest.mark.parametrize("settings", [DRAWN, TRAINED])
def test_every_way_finds_what_it_says(settings):
    told: list[int] = []
    context = Context(data_dir=Path(), steps=told.append, advance=lambda: told.append(1))
    found = read(SelectionWork, settings).run(context)
    assert told == [len(WAYS) + 1] + [1] * (len(WAYS) + 1)
    assert json.loads(json.dumps(found)) == found
    rows = {row["way"]: row for row in found["rows"]}
    assert rows.keys() == WAYS.keys()
    for way in ("topk", "threshold"):
        assert rows[way]["picked"] == 1
        assert rows[way]["norm_share"] == pytest.approx(rows["torch.topk"]["norm_share"])
    assert rows["random"]["norm_share"] < rows["blocks"]["norm_share"]
    assert rows["blocks"]["norm_share"] < rows["topk"]["norm_share"] < 1
    assert 0.5 < rows["threshold, uncounted"]["picked"] < 2


def test_the_small_layers_of_a_model_are_left_out():
    rows = read(SelectionWork, TRAINED).run(Context(data_dir=Path()))["rows"]
    assert {row["layer"] for row in rows} == {"0.weight"}
    assert {row["case"] for row in rows} == {"mlp, 4 rows"}


def test_what_is_drawn_has_the_tail_of_a_double_gamma_distribution():
    found = heavy_tailed(200_000, seed=1)
    assert found.equal(heavy_tailed(200_000, seed=1))
    magnitudes, gamma = found.abs(), torch.distributions.Gamma(0.5, 0.5)
    drawn = gamma.sample((200_000,))
    for share in (0.5, 0.99):
        assert magnitudes.quantile(share) == pytest.approx(drawn.quantile(share).item(), rel=0.05)
    assert abs(found.sign().mean()) < 0.01
