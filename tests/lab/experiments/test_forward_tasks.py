"""Tasks that train by forward gradients, on made-up images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outergrad.launch.errors import RecipeError
from outergrad_lab.data import Format, synthetic
from outergrad_lab.experiments import forward
from outergrad_lab.experiments.forward import WAYS, ForwardWork, in_patches
from outergrad_lab.experiments.task import Context, read

SMALL = {"data": "mnist", "steps": 3, "channels": 8, "groups": 2, "batch_size": 4, "draws": 5}
IMAGES = {"mnist": Format(shape=(64,), classes=3), "cifar10": Format(shape=(3, 16, 16), classes=3)}


@pytest.fixture(autouse=True)
def made_up_data(monkeypatch):
    monkeypatch.setattr(forward, "load", lambda name, _: synthetic(IMAGES[name], 20, seed=0))


@pytest.mark.parametrize("data", IMAGES)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_and_says_what_it_sent(data, way):
    told: list[int] = []
    context = Context(data_dir=Path(), steps=told.append, advance=lambda: told.append(1))
    found = read(ForwardWork, {**SMALL, "data": data, "way": way}).run(context)
    assert told == [3, 1, 1, 1]
    assert json.loads(json.dumps(found)) == found
    (row,) = found["rows"]
    assert 0 <= row["accuracy"] <= 1
    if way == "scalars":  # 2 blocks of 2 groups, along 5 directions, and the step
        assert row["sent_bytes"] == 8 + 4 * 2 * 2 * 5
    else:
        assert row["sent_bytes"] >= 4 * found["parameters"]


def test_images_are_cut_into_squares():
    cut = in_patches(synthetic(IMAGES["cifar10"], 2, seed=0), side=8).x_train
    whole = synthetic(IMAGES["cifar10"], 2, seed=0).x_train
    assert cut.shape == (2, 4, 3 * 64)
    assert cut[0, 1].equal(whole[0, :, :8, 8:].flatten())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"way": "magic"}, "way must be one of backward"),
        ({"way": "scalars", "data": "imdb"}, "data must be one of mnist"),
        ({"way": "scalars", "groups": 3}, "2 or more of each group"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(more, said):
    with pytest.raises(RecipeError, match=said):
        read(ForwardWork, {**SMALL, **more})
