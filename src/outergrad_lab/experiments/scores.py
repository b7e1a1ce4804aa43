"""Scores of a model on test rows."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from outergrad_lab.data import Dataset
from outergrad_lab.training.training import predict


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
