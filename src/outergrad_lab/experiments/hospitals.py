"""Sites that keep rows for validation, and are tested on rows of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from outergrad.launch.errors import RecipeError
from outergrad_lab.data import Dataset
from outergrad_lab.training.job import Job
from outergrad_lab.training.split import SPLITS, Rows, batch_sizes, full_batches
from outergrad_lab.training.training import deal, predict


class Scores(NamedTuple):
    """Scores of one model.

    Attributes:
        loss: Mean cross-entropy.
        accuracy: Share of the labels that are predicted right.
        auc: Area under the ROC curve, one class versus the rest, mean over the classes; None where
            labels are tokens.
    """

    loss: float
    accuracy: float
    auc: float | None


def scores(model: nn.Module, data: Dataset, rows: int | None = None) -> Scores:
    """Tests a model, on all test rows or on `rows` of them, evenly spread."""
    x, y = _spread(data.x_test, rows), _spread(data.y_test, rows)
    logits = predict(model, x)
    accuracy = (logits.argmax(dim=1) == y).float().mean().item()
    auc = area_under_curve(logits, y) if y.dim() == 1 else None
    return Scores(cross_entropy(logits, y).item(), accuracy, auc)


def _spread(t: Tensor, rows: int | None) -> Tensor:
    count = len(t) if rows is None else min(rows, len(t))
    return t[torch.arange(count) * len(t) // count]


def area_under_curve(logits: Tensor, y: Tensor) -> float | None:
    """Returns the mean area over the classes that some rows have and some lack; None if none.

    Args:
        logits: (rows, classes).
        y: Labels, (rows,).
    """
    from sklearn.metrics import roc_auc_score

    shares = logits.double().softmax(dim=1)
    if not shares.isfinite().all():
        return None
    areas = [
        float(roc_auc_score(y == label, shares[:, label]))
        for label in range(logits.shape[1])
        if 0 < int((y == label).sum()) < len(y)
    ]
    return math.fsum(areas) / len(areas) if areas else None


def effective_ranks(model: nn.Module) -> dict[str, float]:
    """Returns, by weight, exponentials of the entropy of each gradient's singular values."""
    return {
        name.removesuffix(".weight"): _effective_rank(p.grad.flatten(1))
        for name, p in model.named_parameters()
        if p.dim() >= 2 and p.grad is not None
    }


def _effective_rank(gradient: Tensor) -> float:
    if not gradient.isfinite().all():
        return math.nan
    values = torch.linalg.svdvals(gradient.double())
    total = values.sum()
    if not total > 0:
        return math.nan
    shares = values[values > 0] / total
    return float(torch.exp(-(shares * shares.log()).sum()))


@dataclass(frozen=True)
class Hospital:
    """Rows of one site; no row is in two parts or at two sites.

    Attributes:
        train: Numbers of the training rows that it learns from, (rows,).
        validation: Numbers of the training rows by which settings and threshold are chosen.
        test: Numbers of its rows among the test rows.
    """

    train: Tensor
    validation: Tensor
    test: Tensor


class Seen(NamedTuple):
    """Outputs of a model for the rows of one site.

    Attributes:
        validation: Logits, (rows, classes).
        validation_y: Labels, (rows,).
        test: Logits.
        test_y: Labels.
    """

    validation: Tensor
    validation_y: Tensor
    test: Tensor
    test_y: Tensor


def dealt(job: Job, data: Dataset, percent: int | None) -> tuple[Rows, list[Hospital]]:
    """Returns the training rows of every site, and all rows of sites that keep some for validation.

    Raises:
        RecipeError: As `hospitals_of` and `deal`.
    """
    if percent is None:
        return deal(job, data), []
    hospitals = hospitals_of(job, data, percent)
    rows = [hospital.train for hospital in hospitals]
    full_batches(rows, batch_sizes(job.split, rows, job.batch_size))
    return rows, hospitals


def hospitals_of(job: Job, data: Dataset, percent: int) -> list[Hospital]:
    """Splits all rows, test rows as the training rows, in sizes and in mixes of classes.

    Args:
        job: Its sites, split and seed are used.
        data: Data of all sites.
        percent: Percentage of a site's training rows kept for validation, at least one row.

    Raises:
        RecipeError: The data cannot be split so, or a site would lack rows for a part.
    """
    split = SPLITS[job.split]
    tested = replace(data, x_train=data.x_test, y_train=data.y_test, groups_train=None)
    sites = zip(split(data, job.sites, job.seed), split(tested, job.sites, job.seed), strict=True)
    return [_hospital(job.seed, site, *rows, percent) for site, rows in enumerate(sites)]


def _hospital(seed: int, site: int, rows: Tensor, test: Tensor, percent: int) -> Hospital:
    kept = max(1, len(rows) * percent // 100)
    if kept >= len(rows) or not len(test):
        raise RecipeError(
            f"validation: site {site} has {len(rows)} rows to train and {len(test)} to test on, "
            f"too few to keep {percent} %: use fewer sites, or more rows"
        )
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
    return Hospital(train=rows[kept:], validation=rows[:kept], test=test)


def seen_at(hospital: Hospital, model: nn.Module, data: Dataset) -> Seen:
    """Returns the outputs of a model for a site's rows."""
    kept, test = hospital.validation, hospital.test
    return Seen(
        predict(model, data.x_train[kept]),
        data.y_train[kept],
        predict(model, data.x_test[test]),
        data.y_test[test],
    )


def judged(sites: Sequence[Seen]) -> dict[str, Any]:
    """Returns scores of the sites' models, all together and one by one.

    With two classes, the second is predicted from a threshold on, the same at all sites. It is
    chosen so that most validation rows of all sites are right; test rows play no part in it.
    """
    kept, kept_y, test, test_y = map(torch.cat, zip(*sites, strict=True))
    threshold = best_threshold(second_class(kept), kept_y) if test.shape[1] == 2 else None
    each = [_scores(site.test, site.test_y, threshold) for site in sites]
    return {
        **_scores(test, test_y, threshold)._asdict(),
        "validation_loss": cross_entropy(kept, kept_y).item(),
        "threshold": threshold,
        "sites": [score._asdict() for score in each],
    }


def second_class(logits: Tensor) -> Tensor:
    """Returns the probability of the second of two classes, float64, (rows,)."""
    return logits.double().softmax(dim=1)[:, 1]


def best_threshold(shares: Tensor, y: Tensor) -> float:
    """Returns the threshold of the second class's probability with which most labels are right.

    If several thresholds are equally good, it is in the middle of the widest gap between two rows.

    Args:
        shares: Probability of the second class, (rows,).
        y: Labels, 0 or 1, (rows,).
    """
    between = torch.cat([shares.new_zeros(1), shares.unique(), shares.new_ones(1)])
    middles, gaps = (between[1:] + between[:-1]) / 2, between.diff()
    right = ((shares >= middles[:, None]) == y.bool()).sum(dim=1)
    gaps[right < right.max()] = -1
    return float(middles[gaps.argmax()])


def _scores(logits: Tensor, y: Tensor, threshold: float | None) -> Scores:
    if threshold is None:
        named = logits.argmax(dim=1)
    else:
        named = (second_class(logits) >= threshold).long()
    accuracy = (named == y).double().mean().item()
    return Scores(cross_entropy(logits, y).item(), accuracy, area_under_curve(logits, y))
