"""Labels of a batch, counted from the gradient of a classifier's last layer."""

from __future__ import annotations

import torch
from torch import Tensor


def label_counts(
    weight_CI: Tensor, bias_C: Tensor, gradient_CI: Tensor, bias_gradient_C: Tensor, rows: int
) -> Tensor:
    """Returns how many rows of a batch have each label.

    The bias gradient of cross-entropy is the mean of `p - y` over the rows, so that the counts are
    `rows (mean p - db)`. The mean of p is that of the model, which the attacker has, at the mean of
    the rows that enter the layer. This mean follows from the gradients: `dW[c] / db[c]` is a mean
    of them, weighted by `p_c - y_c`. Source: Ma et al., ICLR 2023 (iLRG); the rounding to
    `rows` labels is by largest remainders.

    Exact where p hardly depends on the row, as early in training. Repeated labels are counted.

    Args:
        weight_CI: The layer's weight, (classes, inputs).
        bias_C: Its bias, (classes,).
        gradient_CI: Gradient of the weight.
        bias_gradient_C: Gradient of the bias.
        rows: Rows of the batch, which every site is told.

    Returns:
        Counts that add up to `rows`, int64, (classes,).
    """
    weight_CI, bias_C, gradient_CI, bias_gradient_C = (
        t.detach().double() for t in (weight_CI, bias_C, gradient_CI, bias_gradient_C)
    )
    mean_I = _mean_row(gradient_CI, bias_gradient_C)
    likely_C = torch.softmax(weight_CI @ mean_I + bias_C, dim=0)
    return _rounded(rows * (likely_C - bias_gradient_C).clamp(min=0.0), rows)


def _mean_row(gradient_CI: Tensor, bias_gradient_C: Tensor) -> Tensor:
    """Returns the mean of `dW[c] / db[c]`, each class weighted by its bias gradient."""
    signs_C = bias_gradient_C.sign()
    whole = bias_gradient_C.abs().sum()
    if not whole > 0:
        return gradient_CI.new_zeros(gradient_CI.shape[1])
    return (signs_C[:, None] * gradient_CI).sum(dim=0) / whole


def _rounded(counts_C: Tensor, rows: int) -> Tensor:
    whole = float(counts_C.sum())
    if not whole > 0:
        return torch.zeros_like(counts_C, dtype=torch.int64)
    shares_C = counts_C * rows / whole
    found_C = shares_C.floor().long()
    left = rows - int(found_C.sum())
    found_C[(shares_C - found_C).argsort(descending=True)[:left]] += 1
    return found_C
