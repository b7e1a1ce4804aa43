"""Hospitals keep rows to choose by, and are tested on rows of their own."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from outergrad.launch.errors import RecipeError
from outergrad_lab.data import Dataset, load
from outergrad_lab.experiments.hospitals import (
    Seen,
    area_under_curve,
    best_threshold,
    dealt,
    hospitals_of,
    judged,
    second_class,
)
from outergrad_lab.experiments.task import Context
from outergrad_lab.experiments.training import TrainingWork
from outergrad_lab.training.job import Job

SITES, PERCENT = 4, 10
JOB = Job(data="pneumonia", model="two-convolutions", sites=SITES, split="unequal", batch_size=4)


def made_up(rows: int = 600, tests: int = 90) -> Dataset:
    """Three in four rows are of class 1 in training, one in two in the test."""
    x = torch.zeros(rows, 1, 28, 28)
    y, y_test = (torch.arange(rows) % 4 > 0).long(), torch.arange(tests) % 2
    return Dataset(x_train=x, y_train=y, x_test=x[:tests], y_test=y_test, classes=2)


@pytest.fixture(scope="module")
def hospitals():
    return hospitals_of(JOB, made_up(), PERCENT)


def test_no_row_is_anywhere_twice_and_none_is_lost(hospitals):
    trained = torch.cat([part for one in hospitals for part in (one.train, one.validation)])
    assert trained.sort().values.equal(torch.arange(600))
    tested = torch.cat([one.test for one in hospitals])
    assert tested.sort().values.equal(torch.arange(90))


def test_sites_are_unequal_and_keep_their_share(hospitals):
    kept = [len(one.validation) for one in hospitals]
    both = [len(one.train) + n for one, n in zip(hospitals, kept, strict=True)]
    assert both == [320, 160, 80, 40]
    assert kept == [32, 16, 8, 4]
    assert [len(one.test) for one in hospitals] == [48, 24, 12, 6]


def test_sites_differ_in_their_mix_and_test_rows_are_mixed_as_training_rows(hospitals):
    data = made_up()
    trained = [data.y_train[torch.cat([h.train, h.validation])].float().mean() for h in hospitals]
    tested = [data.y_test[h.test].float().mean() for h in hospitals]
    for shares in (trained, tested):
        ill = torch.stack(shares)
        assert (ill[1::2].min() - ill[::2].max()).item() > 0.2


def test_a_seed_deals_the_same_rows_again_and_another_one_others(hospitals):
    again = hospitals_of(JOB, made_up(), PERCENT)
    other = hospitals_of(Job(**{**vars(JOB), "seed": 1}), made_up(), PERCENT)
    assert all(a.train.equal(b.train) for a, b in zip(hospitals, again, strict=True))
    assert not hospitals[0].validation.equal(other[0].validation)


def test_without_validation_all_rows_are_trained_on():
    rows, none = dealt(JOB, made_up(), None)
    assert not none
    assert sum(map(len, rows)) == 600


def test_too_few_rows_are_refused():
    with pytest.raises(RecipeError, match="validation: site 0 has 320"):
        hospitals_of(JOB, made_up(), 100)


# -- what is made of logits ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_no_threshold_is_right_more_often(seed):
    draw = torch.Generator().manual_seed(seed)
    shares = torch.rand(12, generator=draw, dtype=torch.float64).round(decimals=1)
    y = torch.randint(2, (12,), generator=draw)
    right = [int(((shares >= t) == y.bool()).sum()) for t in torch.linspace(-0.05, 1.05, 111)]
    threshold = best_threshold(shares, y)
    assert int(((shares >= threshold) == y.bool()).sum()) == max(right)
    assert 0 <= threshold <= 1


def test_a_threshold_lies_in_the_middle_of_the_widest_gap():
    shares = torch.tensor([0.1, 0.2, 0.6, 0.9], dtype=torch.float64)
    assert best_threshold(shares, torch.tensor([0, 0, 1, 1])) == pytest.approx(0.4)


def test_the_threshold_is_of_validation_rows_and_accuracy_of_test_rows():
    def logits(*shares):
        ill = torch.tensor(shares, dtype=torch.float64).logit()
        return torch.stack([torch.zeros_like(ill), ill], dim=1)

    first = Seen(logits(0.1, 0.7), torch.tensor([0, 1]), logits(0.3, 0.3), torch.tensor([0, 1]))
    second = Seen(logits(0.65, 0.8), torch.tensor([0, 1]), logits(0.6, 0.9), torch.tensor([1, 1]))
    found = judged([first, second])
    assert found["threshold"] == pytest.approx((0.65 + 0.7) / 2)
    assert found["accuracy"] == pytest.approx(2 / 4)
    assert [site["accuracy"] for site in found["sites"]] == pytest.approx([1 / 2, 1 / 2])
    assert found["sites"][1]["auc"] is None  # all are ill
    everything = torch.cat([first.validation, second.validation])
    expected = -(torch.tensor([0.9, 0.7, 0.35, 0.8], dtype=torch.float64)).log().mean()
    assert found["validation_loss"] == pytest.approx(expected.item())
    assert second_class(everything).tolist() == pytest.approx([0.1, 0.7, 0.65, 0.8])


@pytest.mark.parametrize("seed", range(5))
def test_the_area_is_the_share_of_pairs_in_order(seed):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(30, 2, generator=draw, dtype=torch.float64).round(decimals=1)
    logits[:, 0] = 0  # so that equal rows are equal to the bit
    y = torch.randint(2, (30,), generator=draw)
    ill = second_class(logits)
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in product(ill[y == 1], ill[y == 0])]
    assert area_under_curve(logits, y) == pytest.approx(sum(pairs) / len(pairs))


# -- in a training ---------------------------------------------------------------------------------


def trained(data_dir: Path, **settings):
    usual = {**vars(JOB), "validation": PERCENT, "steps": 4, "tests": 1}
    del usual["epochs"]
    work = TrainingWork.of({name: v for name, v in {**usual, **settings}.items() if v != ()})
    return work.run(Context(data_dir=data_dir))["tests"][-1]


def test_every_site_is_tested_and_replicas_that_are_alike_are_judged_as_the_pooled(data_dir):
    rows = [len(h.test) for h in hospitals_of(JOB, load("pneumonia", data_dir), PERCENT)]
    pooled, dense = (trained(data_dir, method=method) for method in ("pooled", "dense"))
    assert len(pooled["sites"]) == len(dense["sites"]) == SITES
    assert dense["validation_loss"] == pytest.approx(pooled["validation_loss"], rel=1e-3)
    shares = [site["accuracy"] for site in dense["sites"]]
    total = sum(n * share for n, share in zip(rows, shares, strict=True))
    assert dense["accuracy"] == pytest.approx(total / sum(rows))
