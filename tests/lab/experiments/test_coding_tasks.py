"""Tasks that learn sparse codes, on made-up images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from outergrad.launch.errors import RecipeError
from outergrad_lab.data import Format, synthetic
from outergrad_lab.experiments import coding
from outergrad_lab.experiments.coding import SHAPES, WAYS, CodingWork, Found, Problem
from outergrad_lab.experiments.task import Context, read

SMALL = {"data": "cifar10", "side": 3, "atoms": 6, "patches": 12, "passes": 40, "lr": 0.05}


@pytest.fixture(autouse=True)
def made_up_data(monkeypatch):
    def images(name, _):
        channels, side = SHAPES[name]
        return synthetic(Format(shape=(channels, side, side), classes=3), 15, seed=0)

    monkeypatch.setattr(coding, "load", images)


@pytest.mark.parametrize("data", SHAPES)
@pytest.mark.parametrize("known", [1.0, 0.75])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_makes_the_objective_smaller(data, known, way):
    told: list[int] = []
    context = Context(data_dir=Path(), steps=told.append, advance=lambda: told.append(1))
    work = read(CodingWork, {**SMALL, "data": data, "known": known, "way": way})
    found = work.run(context)
    assert told == [40] + [1] * 40
    assert json.loads(json.dumps(found)) == found
    (row,) = found["rows"]
    problem = work._problem(coding.load(data, Path()))
    assert row["objective"] < 0.9 * problem.judged(problem.start, work.l1)["objective"]
    assert 0 < row["nonzero"] < 1


@pytest.mark.parametrize("way", WAYS)
def test_atoms_are_no_longer_than_1(way):
    work = read(CodingWork, {**SMALL, "way": way})
    for found in WAYS[way](work, work._problem(coding.load("cifar10", Path()))):
        assert found.d_PK.norm(dim=0).max() <= 1 + 1e-5


def test_what_is_unknown_does_not_count_in_the_objective_but_in_the_psnr():
    d_PK, z_KN = torch.eye(2), torch.tensor([[2.0], [0.0]])
    problem = Problem(torch.tensor([[3.0], [4.0]]), torch.tensor([[1.0], [0.0]]), d_PK, peak=10.0)
    judged = problem.judged(Found(d_PK, z_KN), l1=0.5)
    assert judged["objective"] == pytest.approx(0.5 * 1 + 0.5 * 2)
    assert judged["psnr"] == pytest.approx(10 * torch.tensor(100 / 8.5).log10().item())
    assert judged["nonzero"] == 0.5


def test_ways_differ_in_the_coupling_alone():
    def found(**more):
        return read(CodingWork, {**SMALL, **more}).run(Context(data_dir=Path()))["rows"]

    joint = found(way="joint Adam")
    assert joint == found(way="joint Adam", coupling=5.0)
    assert joint != found(way="CoGD", coupling=5.0)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"way": "magic"}, "way must be one of CoGD"),
        ({"way": "CoGD", "data": "imdb"}, "data must be one of cifar10"),
        ({"way": "CoGD", "known": 1.5}, "known=1.5 must be a share"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(more, said):
    with pytest.raises(RecipeError, match=said):
        read(CodingWork, {**SMALL, **more})
