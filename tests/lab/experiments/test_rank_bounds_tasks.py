"""Tasks that measure ranks beside their bounds, on made-up data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outergrad.launch.errors import RecipeError
from outergrad_lab.data import Format, synthetic
from outergrad_lab.experiments import rank_bounds
from outergrad_lab.experiments.rank_bounds import NECK, NETS, RankBoundsWork
from outergrad_lab.experiments.task import Context, read

SHAPES = {"mnist": (784,), "spoken-digits": (40, 13)}


@pytest.fixture(autouse=True)
def made_up_data(monkeypatch):
    def made_up(name, _):
        return synthetic(Format(shape=SHAPES[name], classes=10), 60, seed=0)

    monkeypatch.setattr(rank_bounds, "load", made_up)


def measured(**asked):
    found = read(RankBoundsWork, {"steps": 2, **asked}).run(Context(data_dir=Path()))
    assert json.loads(json.dumps(found)) == found
    return {row["layer"]: row for row in found["rows"]}


@pytest.mark.parametrize("net", NETS)
def test_every_weight_has_a_rank_within_its_bound(net):
    rows = measured(net=net, degree=2.0 if net != "bottleneck" else 0.5)
    for row in rows.values():
        assert row["counted_rank"] <= row["rank_bound"]
        assert row["whole_effective_rank"] <= row["rank_bound"] + 1e-6


def test_a_narrow_layer_bounds_all_of_a_linear_network_and_not_of_a_leaky_one():
    linear, leaky = (measured(net="bottleneck", degree=slope) for slope in (1.0, 0.5))
    assert {row["rank_bound"] for row in linear.values()} == {NECK}
    assert leaky["0.weight"]["counted_rank"] > NECK


def test_time_and_positions_bound():
    assert measured(net="recurrent", degree=2.0, rows=4)["rnn.weight_hh_l0"]["rank_bound"] == 8
    assert measured(net="convolution", degree=7.0, rows=1)["0.weight"]["rank_bound"] == 9


def test_another_net_is_refused():
    with pytest.raises(RecipeError, match="net must be one of bottleneck"):
        read(RankBoundsWork, {"net": "vgg", "degree": 1.0, "steps": 1})
