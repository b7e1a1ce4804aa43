"""Figures of evaluations: equal to scikit-learn's, and intervals that cover what is true."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, roc_auc_score

from outergrad.record.evaluation import LEAST_ROWS, MOST_BINS, evaluated, evaluation, wilson

TRIALS = 600
LEAST_COVERED = 0.925
"""Share of intervals at 95% that cover: 0.95 less what 600 trials may differ by, and small rows."""


def two_classes(rows: int = 300, seed: int = 0, apart: float = 1.5):
    """Labels, and the true probability of class 1 given the score of each row."""
    r = np.random.default_rng(seed)
    y = np.arange(rows) % 2
    score = r.normal(size=rows) + apart * y
    return y, 1 / (1 + np.exp(-apart * (score - apart / 2)))


def several_classes(rows: int = 300, classes: int = 4, seed: int = 0):
    r = np.random.default_rng(seed)
    y = r.integers(0, classes, rows)
    logits = r.normal(size=(rows, classes)) + 1.5 * np.eye(classes)[y]
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return y, p


# -- equal to scikit-learn ------------------------------------------------------------------------


@pytest.mark.parametrize("decimals", [1, 16])
def test_two_classes_as_in_scikit_learn(decimals):
    """With one decimal many rows have equal probabilities."""
    y, p = two_classes()
    p = p.round(decimals)
    found = evaluated(y, p)["figures"]
    assert found["accuracy"][0] == pytest.approx(accuracy_score(y, p > 0.5))
    assert found["auc"][0] == pytest.approx(roc_auc_score(y, p))


def test_several_classes_as_in_scikit_learn():
    y, p = several_classes()
    found = evaluated(y, p)["figures"]
    assert found["accuracy"][0] == pytest.approx(accuracy_score(y, p.argmax(axis=1)))
    assert found["auc"][0] == pytest.approx(roc_auc_score(y, p, multi_class="ovr"))


def test_calibration_as_in_scikit_learn():
    y, p = two_classes(rows=400)
    bins = evaluated(y, p)["calibration"]
    observed, predicted = calibration_curve(y, p, n_bins=MOST_BINS, strategy="quantile")
    assert [one[1] for one in bins] == pytest.approx(predicted)
    assert [one[2] for one in bins] == pytest.approx(observed)


def test_columns_vectors_and_logits_of_two_classes_give_the_same():
    y, p = two_classes()
    logits = np.log(p / (1 - p))
    columns = evaluated(y, np.stack([1 - p, p], axis=1))["figures"]
    assert columns == evaluated(y, p)["figures"] == evaluated(y, p[:, None])["figures"]
    for scores in (logits, np.stack([-logits, logits], axis=1)):
        of_logits = evaluated(y, scores)
        assert of_logits["calibration"] == ()
        assert of_logits["figures"] == {n: columns[n] for n in ("accuracy", "auc")}


def test_tensors_of_any_precision_and_lists_are_taken():
    y, p = several_classes()
    found = evaluated(torch.tensor(y), torch.tensor(p, requires_grad=True))
    assert found == evaluated(y.tolist(), p.tolist())
    rough = evaluated(torch.tensor(y), torch.tensor(p).bfloat16())
    assert rough["calibration"] != ()
    assert rough["figures"]["auc"][0] == pytest.approx(found["figures"]["auc"][0], abs=0.01)


# -- intervals cover ------------------------------------------------------------------------------


def covered(intervals, truth: float) -> float:
    return float(np.mean([low <= truth <= high for low, high in intervals]))


def normal_cdf(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.98])
def test_intervals_of_a_share_cover_it(share):
    counts = np.random.default_rng(0).binomial(60, share, TRIALS)
    assert covered((wilson(count, 60) for count in counts), share) > LEAST_COVERED


@pytest.mark.parametrize(("rows", "apart"), [(60, 1.0), (60, 2.0), (400, 3.0)])
def test_intervals_of_an_area_cover_it(rows, apart):
    found = (evaluated(*two_classes(rows, seed, apart))["figures"]["auc"] for seed in range(TRIALS))
    truth = normal_cdf(apart / math.sqrt(2))
    assert covered((one[1:] for one in found), truth) > LEAST_COVERED


def test_intervals_of_an_area_over_classes_cover_it():
    found = [evaluated(*several_classes(120, 3, seed))["figures"]["auc"] for seed in range(TRIALS)]
    truth = evaluated(*several_classes(40_000, 3, TRIALS))["figures"]["auc"][0]
    assert covered((one[1:] for one in found), truth) > LEAST_COVERED


def test_intervals_of_gains_cover_them():
    """Both models see the same rows, and each its own noise beside."""

    def trial(seed: int, rows: int = 100) -> dict:
        r = np.random.default_rng(seed)
        y = np.arange(rows) % 2
        seen = 1.2 * y - 0.6 + 0.7 * r.normal(size=rows)
        models = [seen + noise * r.normal(size=rows) for noise in (0.5, 1.2)]
        return evaluated(y, *(1 / (1 + np.exp(-score)) for score in models))["gains"]

    found, truth = [trial(seed) for seed in range(TRIALS)], trial(TRIALS, 400_000)
    for name in ("accuracy", "auc"):
        assert truth[name][0] > 0.05
        assert covered((one[name][1:] for one in found), truth[name][0]) > LEAST_COVERED


def test_an_area_without_errors_still_has_an_interval():
    area, low, high = evaluated([0] * 20 + [1] * 10, [0.1] * 20 + [0.9] * 10)["figures"]["auc"]
    assert (area, high) == (1, 1)
    assert 0.6 < low < 0.8


def test_intervals_stay_where_figures_can_be():
    for apart in (0.1, 4.0, 8.0):
        for value, low, high in [
            evaluated(*two_classes(12, seed, apart))["figures"][name]
            for seed in range(50)
            for name in ("accuracy", "auc")
        ]:
            assert 0 <= low <= value <= high <= 1


# -- bins -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [9, 10, 19, 20, 57, 100, 1234])
@pytest.mark.parametrize("decimals", [1, 16])
def test_no_bin_is_of_few_rows_and_none_is_left_out(rows, decimals):
    y, p = two_classes(rows)
    bins = evaluated(y, p.round(decimals))["calibration"]
    if rows < LEAST_ROWS:
        assert bins == ()
        return
    assert sum(one[0] for one in bins) == rows
    assert len(bins) <= MOST_BINS
    assert min(one[0] for one in bins) >= LEAST_ROWS
    assert [one[1] for one in bins] == sorted(one[1] for one in bins)


def test_true_probabilities_are_calibrated_and_bold_ones_are_not():
    y, p = two_classes(20_000)
    bold = p**3 / (p**3 + (1 - p) ** 3)
    errors = [evaluated(y, one)["figures"]["calibration error"][0] for one in (p, bold)]
    assert errors[0] < 0.02 < 0.08 < errors[1]


# -- what is given --------------------------------------------------------------------------------


def test_classes_have_names_and_shares():
    y, p = several_classes(classes=3)
    found = evaluated(y, p, names=["none", "some", "much"])["shares"]
    assert found == pytest.approx(
        {name: (y == c).mean() for c, name in enumerate(("none", "some", "much"))}
    )


def test_one_class_alone_has_no_area():
    assert "auc" not in evaluated([1] * 12, [0.7] * 12)["figures"]


def test_metrics_alone_and_beside():
    metrics = {"F1": torch.tensor(0.5), "loss": 0.25}
    assert evaluation(None, None, None, metrics)["figures"] == {"F1": (0.5,), "loss": (0.25,)}
    assert {"accuracy", "F1"} <= evaluation([0, 1], [0.1, 0.9], None, metrics)["figures"].keys()


def test_what_torchmetrics_computes_is_taken():
    torchmetrics = pytest.importorskip("torchmetrics")
    y, p = (torch.tensor(one) for one in two_classes())
    metrics = torchmetrics.MetricCollection(
        [torchmetrics.Accuracy(task="binary"), torchmetrics.AUROC(task="binary")]
    )
    metrics.update(p, y)
    found, ours = evaluation(y, p, None, metrics.compute())["figures"], evaluated(y, p)["figures"]
    assert found["BinaryAccuracy"][0] == pytest.approx(ours["accuracy"][0])
    assert found["BinaryAUROC"][0] == pytest.approx(ours["auc"][0], abs=1e-6)


WRONG = {
    "too few": (([0, 1], [0.5]), "p has the shape"),
    "rows": (([0, 1], np.zeros((2, 2, 2))), "p has the shape"),
    "labels": (([[0, 1], [0, 1]], [0.5, 0.5]), "y has the shape"),
    "nothing": (([], []), "y has the shape"),
    "halves": (([0, 0.5], [0.5, 0.5]), "no whole numbers"),
    "words": ((["ill", "well"], [0.5, 0.5]), "y holds"),
    "nan": (([0, 1], [0.5, math.nan]), "p has NaN or infinities in 1 of 2 rows"),
    "range": (([0, 2], [0.5, 0.5]), "y has the label 2, and p is of the classes 0 to 1"),
    "below": (([0, -1], [0.5, 0.5]), "y has the label -1"),
    "alone": (([0, 1], [0.5, 0.5], [0.5]), "alone has the shape"),
    "other classes": (([0, 1], [0.5, 0.5], [[0.2, 0.3, 0.5]] * 2), "alone has 3 classes"),
    "names": (([0, 1], [0.5, 0.5], None, None, ["a"]), "classes has 1 names"),
}


@pytest.mark.parametrize(("given", "told"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_told_in_a_line(given, told):
    with pytest.raises(ValueError, match=told) as caught:
        evaluation(*given)
    assert str(caught.value).startswith("session.log_eval: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [(None, None), ([0], None), (None, [0.5]), (None, None, [0.5], {"loss": 1})],
)
def test_half_of_what_is_needed_is_refused(given):
    with pytest.raises(TypeError, match="pass y and p"):
        evaluation(*given)


def test_a_metric_is_one_number():
    with pytest.raises(TypeError, match=r"metric 'F1'.*average="):
        evaluation(None, None, None, {"F1": torch.ones(3)})
