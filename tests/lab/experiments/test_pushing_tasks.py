"""Tasks that train by push-sum, on made-up images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outergrad.launch.errors import RecipeError
from outergrad_lab.data import Format, synthetic
from outergrad_lab.experiments import pushing
from outergrad_lab.experiments.pushing import WAYS, PushingWork
from outergrad_lab.experiments.task import Context, read

SMALL = {"data": "mnist", "steps": 3, "hidden": 5, "sites": 3, "batch_size": 4}


@pytest.fixture(autouse=True)
def made_up_data(monkeypatch):
    images = synthetic(Format(shape=(1, 4, 4), classes=3), 20, seed=0)
    monkeypatch.setattr(pushing, "load", lambda name, _: images)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_and_says_what_it_sent(way):
    told: list[int] = []
    context = Context(data_dir=Path(), steps=told.append, advance=lambda: told.append(1))
    found = read(PushingWork, {**SMALL, "way": way}).run(context)
    assert told == [3, 1, 1, 1]
    assert json.loads(json.dumps(found)) == found
    (row,) = found["rows"]
    assert 0 <= row["accuracy"] <= 1
    assert row["sent_bytes"] > 0


def test_sparse_pushes_are_few_bytes():
    def sent(way):
        context = Context(data_dir=Path())
        return read(PushingWork, {**SMALL, "way": way}).run(context)["rows"][0]["sent_bytes"]

    assert sent("Sparse-Push, ring") < 0.6 * sent("push-sum, ring")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"way": "magic"}, "way must be one of all-reduce"),
        ({"way": "Sparse-Push, ring", "gamma": 2.0}, "gamma=2.0; use a number above 0"),
        ({"way": "push-sum, ring", "lost": 1.0}, "share=1.0; use a number from 0 to below 1"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(more, said):
    with pytest.raises(RecipeError, match=said):
        read(PushingWork, {**SMALL, **more})
