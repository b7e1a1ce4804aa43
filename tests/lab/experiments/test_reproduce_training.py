"""Training tasks: all methods on the same data, tested evenly, with bytes as sessions count."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from outergrad.launch.errors import RecipeError
from outergrad_lab.experiments.hospitals import area_under_curve, effective_ranks
from outergrad_lab.experiments.task import Context
from outergrad_lab.experiments.training import TrainingWork

SETTINGS = {"data": "digits", "widths": [32], "split": "class", "batch_size": 16, "steps": 12}


def run(tmp_path, **settings):
    told = []
    context = Context(data_dir=tmp_path, steps=told.append, advance=lambda: told.append(1))
    found = TrainingWork.of({**SETTINGS, **settings}).run(context)
    assert told == [12] + [1] * 12
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sites", [2, 3])
def test_exact_methods_follow_the_pooled_training(sites, tmp_path) -> None:
    pooled = run(tmp_path, method="pooled", sites=sites)
    for method in ("ddp", "dense", "dad", "edad"):
        found = run(tmp_path, method=method, sites=sites)
        assert found["losses"] == pytest.approx(pooled["losses"], rel=1e-4)
        assert found["tests"][-1]["loss"] == pytest.approx(pooled["tests"][-1]["loss"], rel=1e-3)
        assert found["parameters"] == pooled["parameters"] == 64 * 32 + 32 + 32 * 10 + 10


@pytest.mark.slow
def test_tests_are_spread_evenly_and_bytes_add_up(tmp_path) -> None:
    found = run(tmp_path, method="dense", tests=3)
    assert [test["step"] for test in found["tests"]] == [4, 8, 12]
    sent = [test["sent_bytes"] for test in found["tests"]]
    assert sent[0] > 0
    assert sent == pytest.approx([sent[0] * k for k in (1, 2, 3)], rel=0.02)
    assert all(test["sites"] is None for test in found["tests"])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"method": "alone"}, {"method": "dad", "per_site": True}])
def test_sites_are_tested_each_where_they_may_differ(settings, tmp_path) -> None:
    last = run(tmp_path, **settings)["tests"][-1]
    shares = [site["accuracy"] for site in last["sites"]]
    assert last["accuracy"] == pytest.approx(sum(shares) / 2)
    assert (shares[0] == shares[1]) == (settings["method"] == "dad")


@pytest.mark.slow
def test_ranks_of_the_gradients_are_kept_by_layer(tmp_path) -> None:
    layers = run(tmp_path, method="dad", ranks=True, tests=2)["layers"]
    assert list(layers) == ["0", "2"]
    for found in layers.values():
        assert [point["step"] for point in found] == [6, 12]
        assert all(1 <= point["effective_rank"] <= 32 for point in found)


def test_effective_rank_of_known_gradients() -> None:
    model = nn.Linear(4, 4)
    for values, expected in [([1, 1, 1, 1], 4.0), ([3, 0, 0, 0], 1.0), ([0, 0, 0, 0], math.nan)]:
        model.weight.grad = torch.diag(torch.tensor(values, dtype=torch.float32))
        assert effective_ranks(model)["weight"] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("classes", [2, 5])
def test_area_under_the_curve_is_that_of_one_versus_the_rest(classes) -> None:
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randn(200, classes, generator=generator)
    y = torch.arange(200) % classes
    shares = logits.softmax(dim=1).double()
    shares /= shares.sum(dim=1, keepdim=True)
    if classes == 2:
        expected = roc_auc_score(y, shares[:, 1])
    else:
        expected = roc_auc_score(y, shares, multi_class="ovr")
    assert area_under_curve(logits, y) == pytest.approx(expected, abs=1e-6)
    assert area_under_curve(logits, torch.zeros(200)) is None
    assert area_under_curve(logits * math.nan, y) is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"steps": 1.5}, "steps must be a whole number"),
        ({"tests": 0}, "tests must be a whole number"),
        ({"epochs": 2}, "give either steps or epochs"),
        ({"step": 2}, "no setting 'step'"),
        ({"method": "rank-dad:rank=0"}, "rank"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, expected) -> None:
    with pytest.raises(RecipeError, match=expected):
        TrainingWork.of({**SETTINGS, **settings})
