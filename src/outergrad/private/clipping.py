"""Factors by which the gradient of each sample is clipped. B: samples."""

from __future__ import annotations

from torch import Tensor


def clipped(norms_B: Tensor, limit: float) -> Tensor:
    """Returns min(1, C / |g|) of each sample, (B,): the longest becomes C, the others stay.

    Source: Abadi et al., "Deep Learning with Differential Privacy", arXiv 1607.00133.
    """
    return (limit / norms_B).clamp(max=1.0)


def normalized(norms_B: Tensor, limit: float, stability: float) -> Tensor:
    """Returns C / (|g| + stability) of each sample, (B,): all become nearly C long.

    Source: Bu et al., "Automatic Clipping", arXiv 2206.07136, AUTO-S.
    """
    return limit / (norms_B + stability)
