"""Tasks that train without a centre, on made-up data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import outergrad as og
from outergrad.launch.errors import RecipeError
from outergrad_lab.data import Format, synthetic
from outergrad_lab.experiments import gossip
from outergrad_lab.experiments.frames import finals
from outergrad_lab.experiments.gossip import WAYS, GossipWork
from outergrad_lab.experiments.task import Context, read

SMALL = {"data": "mnist", "steps": 4, "batch_size": 4, "sites": 4, "optimizer": "sgd", "lr": 0.1}
FORMATS = {
    "mnist": Format(shape=(1, 4, 4), classes=3),
    "tinyshakespeare": Format(shape=(8,), classes=5, tokens=True),
}


@pytest.fixture(autouse=True)
def made_up_data(monkeypatch):
    monkeypatch.setattr(gossip, "load", lambda name, _: synthetic(FORMATS[name], 40, seed=0))


def done(**settings):
    told: list[int] = []
    context = Context(data_dir=Path(), steps=told.append, advance=lambda: told.append(1))
    found = read(GossipWork, {**SMALL, **settings}).run(context)
    assert told == [4] + [1] * 4
    assert json.loads(json.dumps(found)) == found
    (row,) = found["rows"]
    return row, found["parameters"]


@pytest.mark.parametrize("data", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_and_is_tested(data, way):
    row, parameters = done(data=data, way=way, every=2)
    assert 0 <= row["worst_accuracy"] <= row["best_accuracy"] <= 1
    assert 0 <= row["accuracy"] <= 1
    assert 0 < row["sent_bytes"] < 4 * 4 * parameters
    if way in ("all-reduce", "local steps"):  # after the last step all sites are alike
        assert row["worst_accuracy"] == row["best_accuracy"] == row["accuracy"]


def test_gossip_with_all_and_without_momentum_is_local_steps():
    (one, _), (other, _) = (done(way=way, every=2) for way in ("complete", "local steps"))
    assert one["test_loss"] == pytest.approx(other["test_loss"], abs=1e-5)
    assert one["sent_bytes"] > other["sent_bytes"]


def test_what_differs_in_exchanges_is_one_column():
    settings = {"way": "ring", "every": 3, "outer_lr": 0.5, "momentum": 0.25, "overlap": 2}
    rows = [{"accuracy": 0.9, "worst_accuracy": 0.8, "sent_bytes": 4.0}]
    results = [
        {"kind": "gossip", "settings": {**SMALL, **settings}, "rows": rows},
        {"kind": "gossip", "settings": {**SMALL, "way": "complete"}, "rows": rows},
    ]
    found = finals(results)
    told = ["ring, every=3, lr=0.5, momentum=0.25, overlap=2", "complete"]
    assert found["exchanges"].tolist() == told
    assert found["worst_accuracy"].tolist() == [0.8, 0.8]


@pytest.mark.parametrize("way", ["ring", "local steps"])
def test_settings_of_exchanges_reach_the_method(way):
    work = {"way": way, "every": 3, "outer_lr": 0.5, "momentum": 0.25, "overlap": 2}
    made = read(GossipWork, {**SMALL, **work}).method
    if way == "ring":
        assert made == og.Gossip("ring", every=3, lr=0.5, momentum=0.25, overlap=2)
        return
    assert (made.k, made.overlap) == (3, 2)
    (group,) = made.optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.5, 0.25, True)


def test_sorted_rows_give_a_site_few_labels():
    data = synthetic(FORMATS["mnist"], 40, seed=0)
    work = {"way": "ring", "sites": 3}
    for split, most in (("sorted", 2), ("even", 3)):
        dealt = read(GossipWork, {**SMALL, **work, "split": split})._dealt(data)
        labels = [len(data.y_train[rows].unique()) for rows in dealt]
        assert sorted(torch.cat(dealt).tolist()) == [*range(len(data.y_train))]
        assert (max(labels) <= most) == (split == "sorted" or most == 3)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"way": "star"}, "way must be one of all-reduce, local steps, ring"),
        ({"data": "imdb"}, "data must be one of mnist, tinyshakespeare"),
        ({"way": "ring", "overlap": 2}, "overlap=2; use a whole number from 0 to every=1"),
    ],
)
def test_what_cannot_be_trained_is_refused(changed, told):
    with pytest.raises(RecipeError, match=told):
        read(GossipWork, {**SMALL, "way": "ring", **changed})
