"""Tasks that compress gradients of a real training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from outergrad.launch.errors import RecipeError
from outergrad_lab.data import synthetic
from outergrad_lab.experiments import capture as captures
from outergrad_lab.experiments import iterations
from outergrad_lab.experiments.capture import capture, formed
from outergrad_lab.experiments.iterations import TRIALS, IterationsWork
from outergrad_lab.experiments.task import Context, read
from outergrad_lab.workloads import WORKLOADS

SETTINGS = {"workload": "gru", "batch_size": 4, "rank": 2, "steps": 5}
REFUSED = [
    ({"workload": "gpt"}, "workload must be one of mlp"),
    ({"batch_size": 0}, "batch_size must be a whole number of 1"),
    ({"rank": 1.5}, "rank must be a whole number"),
    ({"steps": 3}, "steps must be a whole number of 4"),
    ({"tolerance": 0.1}, "no setting 'tolerance'"),
]


@pytest.fixture(autouse=True)
def made_up_data(monkeypatch):
    """Small models, and data that needs no files."""
    small = {
        name: replace(WORKLOADS[name], widths=(24,)) for name in iterations.WORKLOADS_IN_FACTORS
    }
    monkeypatch.setattr(captures, "WORKLOADS", small)
    monkeypatch.setattr(iterations, "REPEATS", (1, 1))
    formats = {recipe.data: recipe.format for recipe in small.values()}
    monkeypatch.setattr(captures, "load", lambda name, _: synthetic(formats[name], 8, seed=0))
    capture.cache_clear()
    yield
    capture.cache_clear()


@pytest.mark.parametrize(("changed", "said"), REFUSED)
def test_a_wrong_setting_is_refused_by_name(changed, said):
    with pytest.raises(RecipeError, match=said):
        read(IterationsWork, {**SETTINGS, **changed})


@pytest.mark.parametrize("workload", iterations.WORKLOADS_IN_FACTORS)
def test_what_is_captured_is_the_gradient_of_every_weight(workload):
    found = {layer.name: layer for layer in capture(workload, 4, 1, 1, 0, Path())}
    torch.manual_seed(0)
    model = captures.WORKLOADS[workload].build().double()
    recipe = captures.WORKLOADS[workload]
    ((x, y),) = captures._batches(captures.load(recipe.data, Path()), 4, 1, 0)
    cross_entropy(model(x.double()), y).backward()
    weights = {name: p.grad for name, p in model.named_parameters() if p.dim() == 2}
    assert set(found) == set(weights)
    for name, gradient in weights.items():
        error = (formed(found[name].last) - gradient).norm() / gradient.norm()
        assert error < 1e-5


def test_no_error_is_below_the_best_and_many_iterations_reach_it():
    told: list[int] = []
    context = Context(data_dir=Path(), steps=told.append, advance=lambda: told.append(1))
    found = read(IterationsWork, SETTINGS).run(context)
    assert told == [len(TRIALS) + 1] + [1] * (len(TRIALS) + 1)
    assert json.loads(json.dumps(found)) == found
    assert len({row["layer"] for row in found["rows"]}) > 1
    for row in found["rows"]:
        assert row["ratio"] > 1 - 1e-4
        assert row["kept_rank"] <= 2
        if row["iterations"] == 32:
            assert row["ratio"] < 1.02


def test_a_tolerance_keeps_no_more_triplets_than_it_needs():
    rows = read(IterationsWork, {**SETTINGS, "rank": 6}).run(Context(data_dir=Path()))["rows"]
    loose = [row for row in rows if row["tolerance"] == 0.3]
    assert loose
    for row in loose:
        assert row["error"] <= 0.3 or row["kept_rank"] == 6


def test_layers_of_which_every_way_finds_all_are_left_out():
    found = read(IterationsWork, {**SETTINGS, "rank": 100}).run(Context(data_dir=Path()))
    assert found["rows"] == []
