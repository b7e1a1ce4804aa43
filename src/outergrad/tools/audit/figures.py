"""Figures of an attack: what came back, beside the truth."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

EXACT, CLOSE = 1e-4, 5e-2
"""Relative errors up to which a row has come back exactly, or can be recognised."""
_WINDOW = 7


def nearest(found_FI: Tensor, truth_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the nearest found row of each true row, and its error relative to the true row.

    Args:
        found_FI: At least one row, (found, inputs).
        truth_NI: (rows, inputs).
    """
    truth_NI, found_FI = truth_NI.double(), found_FI.double()
    distances_NF = torch.cdist(truth_NI, found_FI, compute_mode="donot_use_mm_for_euclid_dist")
    errors_N, index_N = distances_NF.min(dim=1)
    return found_FI[index_N], errors_N / truth_NI.norm(dim=1).clamp(min=1e-300)


def rows_back(found_FI: Tensor, truth_NI: Tensor, within: float = EXACT) -> tuple[int, int]:
    """Returns how many true rows came back, and how many found rows are no true ones.

    Args:
        found_FI: (found, inputs).
        truth_NI: (rows, inputs).
        within: Relative error up to which two rows are one.
    """
    if not len(found_FI):
        return 0, 0
    _, errors_N = nearest(found_FI, truth_NI)
    _, misses_F = nearest(truth_NI, found_FI)
    return int((errors_N <= within).sum()), int((misses_F > within).sum())


def psnr_db(found: Tensor, truth: Tensor) -> float:
    """Returns the peak signal-to-noise ratio, dB; the peak is the range of the truth."""
    error = float((found.double() - truth.double()).square().mean())
    peak = float(truth.max() - truth.min())
    return math.inf if error == 0 else 10 * math.log10(max(peak**2, 1e-30) / error)


def ssim(found_CHW: Tensor, truth_CHW: Tensor) -> float:
    """Returns the structural similarity of two images, -1 to 1, mean over windows of 7 x 7.

    Source: Wang et al., IEEE TIP 2004, with a uniform window; the peak is the range of the truth.
    """
    x, y = found_CHW.double()[None], truth_CHW.double()[None]
    peak = float(y.max() - y.min()) or 1.0
    small, medium = (0.01 * peak) ** 2, (0.03 * peak) ** 2
    window = min(_WINDOW, *x.shape[-2:])

    def mean(t: Tensor) -> Tensor:
        return F.avg_pool2d(t, window, stride=1)

    mean_x, mean_y = mean(x), mean(y)
    var_x, var_y = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2
    shared = mean(x * y) - mean_x * mean_y
    above = (2 * mean_x * mean_y + small) * (2 * shared + medium)
    return float((above / ((mean_x**2 + mean_y**2 + small) * (var_x + var_y + medium))).mean())


def auc(members_M: Tensor, others_N: Tensor) -> float:
    """Returns the probability that a member has a larger score than another; 0.5 is chance."""
    above = (members_M[:, None] > others_N[None]).double()
    equal = (members_M[:, None] == others_N[None]).double()
    return float((above + equal / 2).mean())


def auc_deviation(members: int, others: int) -> float:
    """Returns the standard deviation of the AUC of scores that tell nothing (Mann and Whitney)."""
    return ((members + others + 1) / (12 * members * others)) ** 0.5
