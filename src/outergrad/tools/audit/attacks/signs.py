"""Labels of each row, from the signs of the last delta."""

from __future__ import annotations

import torch
from torch import Tensor

_BALANCED = 1e-3
"""Sum of a row's deltas, as a share of their sizes, up to which they are of a cross-entropy."""


def labels_by_signs(deltas_NC: Tensor) -> Tensor:
    """Returns the label of each row of the deltas behind a softmax; none if they are others.

    The delta of cross-entropy is `p - y`: negative for the label alone, and zero in sum. Choose it
    where deltas of the last layer travel, as by `og.EDAD`. Source: Zhao et al., arXiv 2001.02610
    (iDLG).

    Args:
        deltas_NC: Deltas of the last outputs, (rows, classes).
    """
    deltas_NC = deltas_NC.double()
    sizes_N = deltas_NC.abs().sum(dim=1)
    is_one_below = (deltas_NC < 0).sum(dim=1) == 1
    is_balanced = deltas_NC.sum(dim=1).abs() <= _BALANCED * sizes_N
    if not bool((is_one_below & is_balanced & (sizes_N > 0)).all()):
        return torch.zeros(0, dtype=torch.int64)
    return deltas_NC.argmin(dim=1)
