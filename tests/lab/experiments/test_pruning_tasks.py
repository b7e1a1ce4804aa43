"""Tasks that take channels out, on made-up images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from outergrad.launch.errors import RecipeError
from outergrad_lab.data import Format, synthetic
from outergrad_lab.experiments import pruning
from outergrad_lab.experiments.pruning import (
    SHAPES,
    WAYS,
    PruningWork,
    largest,
    network,
    pairs,
    take_out,
)
from outergrad_lab.experiments.task import Context, read

SMALL = {"data": "mnist", "steps": 4, "tuned_steps": 2, "batch_size": 4, "test_rows": 8}


@pytest.fixture(autouse=True)
def made_up_data(monkeypatch):
    def images(name, _):
        channels, side = SHAPES[name]
        return synthetic(Format(shape=(channels, side, side), classes=3), 20, seed=0)

    monkeypatch.setattr(pruning, "load", images)


@pytest.mark.parametrize("data", SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_tested_trained_taken_out_and_tuned(data, way):
    told: list[int] = []
    context = Context(data_dir=Path(), steps=told.append, advance=lambda: told.append(1))
    found = read(PruningWork, {**SMALL, "data": data, "way": way, "removed": 75}).run(context)
    assert told == [6] + [1] * 6
    assert json.loads(json.dumps(found)) == found
    assert [row["case"] for row in found["rows"]] == ["trained", "taken out", "tuned"]
    assert all(0 <= row["accuracy"] <= 1 for row in found["rows"])
    assert found["kept"] == found["channels"] / 4


def test_a_channel_that_was_taken_out_has_no_part_in_what_comes_out():
    model = network(1, 28, 3).eval()
    kept = [largest(torch.rand(norm.num_features), 0.5) for _, norm in pairs(model)]
    take_out(model, kept)
    x = torch.rand(2, 1, 28, 28)
    before = model(x)
    with torch.no_grad():
        for (conv, _), kept_C in zip(pairs(model), kept, strict=True):
            conv.weight[~kept_C] = torch.randn_like(conv.weight[~kept_C])
    torch.testing.assert_close(model(x), before)


def test_the_largest_scales_are_kept_and_one_at_least():
    scales = torch.tensor([0.1, -3.0, 0.0, 2.0])
    assert largest(scales, 0.5).tolist() == [False, True, False, True]
    assert largest(scales, 0.01).tolist() == [False, True, False, False]


@pytest.mark.parametrize("way", WAYS)
def test_a_penalty_brings_scales_to_zero(way):
    torch.manual_seed(0)
    model = network(1, 28, 3)
    work = read(PruningWork, {**SMALL, "way": way, "l1": 1.0, "lr": 0.05})
    training = WAYS[way](work, model)
    for k in range(60):
        model.zero_grad()
        model(torch.randn(4, 1, 28, 28)).square().mean().backward()
        training.step(k)
    training.end()
    scales = torch.cat([norm.weight for _, norm in pairs(model)])
    assert (scales == 0).float().mean() > 0.5


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"way": "magic"}, "way must be one of CoGD"),
        ({"way": "CoGD", "data": "imdb"}, "data must be one of mnist"),
        ({"way": "CoGD", "removed": 100}, "must leave channels"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(more, said):
    with pytest.raises(RecipeError, match=said):
        read(PruningWork, {**SMALL, **more})
