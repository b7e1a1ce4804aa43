"""Tasks that split spectra by group, on made-up data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outergrad.launch.errors import RecipeError
from outergrad_lab.data import Format, synthetic
from outergrad_lab.experiments import autospec
from outergrad_lab.experiments.autospec import AutospecWork
from outergrad_lab.experiments.task import Context, read

SMALL = {"steps": 4, "every": 2, "batch_size": 8}
SHAPES = {"mnist": (784,), "spoken-digits": (4, 13)}


@pytest.fixture(autouse=True)
def made_up_data(monkeypatch):
    def made_up(name, _):
        data = synthetic(Format(shape=SHAPES[name], classes=10), 60, seed=0)
        return replace(data, groups_train=torch.arange(len(data.y_train)) % 3)

    monkeypatch.setattr(autospec, "load", made_up)


@pytest.mark.parametrize(
    ("data", "by", "layers"),
    [
        ("mnist", "class", 3),
        ("mnist", "class, drawn", 3),
        ("spoken-digits", "speaker", 3),
        ("spoken-digits", "speaker, drawn", 3),
    ],
)
def test_every_layer_and_kind_has_a_row_and_so_has_the_loss(data, by, layers):
    told: list[int] = []
    context = Context(data_dir=Path(), steps=told.append, advance=lambda: told.append(1))
    found = read(AutospecWork, {**SMALL, "data": data, "by": by}).run(context)
    assert told == [4, 1, 1, 1, 1]
    assert json.loads(json.dumps(found)) == found
    assert len(found["rows"]) == 3 * layers + 1
    assert found["rows"][-1]["way"] == "loss"
    assert all(0 <= row["spread"] < 3 for row in found["rows"])
    of_errors = [row for row in found["rows"] if "error_correlation" in row]
    assert len(of_errors) == (len(found["rows"]) if by == "class" else 0)


def test_wrong_labels_of_a_site_show_in_its_loss_and_in_its_gradient():
    asked = {"data": "mnist", "by": "site", "sites": 3, "wrong": 100, "steps": 60, "every": 5}
    found = read(AutospecWork, asked).run(Context(data_dir=Path()))
    ratios = {(row["layer"], row["way"]): row["odd_ratio"] for row in found["rows"]}
    assert ratios["all", "loss"] > 1
    assert ratios["4.weight", "gradient"] > 1


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"data": "imdb", "by": "class"}, "data must be one of mnist"),
        ({"data": "mnist", "by": "age"}, "by must be one of class"),
        ({"data": "mnist", "by": "speaker"}, "needs data: spoken-digits"),
    ],
)
def test_what_there_is_not_is_refused(asked, why):
    with pytest.raises(RecipeError, match=why):
        read(AutospecWork, {**SMALL, **asked})
