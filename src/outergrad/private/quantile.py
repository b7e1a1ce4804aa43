"""A clipping threshold that follows a quantile of the samples' norms, by noisy counts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_NEAR = 1e-4
"""Largest difference of logarithms that is taken for rounding: of masked sums it is 2⁻²⁴."""


class Threshold:
    """The threshold C, which goes to where a share of the samples has shorter gradients.

    Source: Andrew et al., "Differentially Private Learning with Adaptive Clipping",
    arXiv 1905.03871, algorithm 1.

    Args:
        start: the first threshold.
        quantile: share of the samples below it.
        rate: step of its logarithm per unit of the share that is wrong.
        batch: expected number of samples of all sites.

    Attributes:
        value: the threshold, the same on all sites.
    """

    def __init__(self, start: float, quantile: float, rate: float, batch: float) -> None:
        self.value = start
        self._quantile, self._rate, self._batch = quantile, rate, batch
        self._own: Tensor | None = None
        self._sites = 1

    def count(self, norms_B: Tensor, noise: Tensor, sites: int) -> None:
        """Counts this site's samples below the threshold as 1/2, the others as -1/2, with noise.

        Each sample so changes the count by 1/2, half of what it would as 1 or 0.
        """
        below = (norms_B <= self.value).to(noise.dtype) - 0.5
        self._own, self._sites = below.sum() + noise, sites

    def tell(self) -> Tensor:
        """Returns the noisy count, and the threshold's logarithm as large as counts, float64, (2,).

        Raises:
            RuntimeError: nothing was counted since the last time.
        """
        if self._own is None:
            raise RuntimeError("og.Private: a step has ended in which no samples were counted")
        own, self._own = self._own, None
        return torch.stack([own, torch.full_like(own, self._batch * math.log(self.value))])

    def hear(self, total: Tensor) -> None:
        """Moves the threshold by the sums over the sites, (2,).

        Raises:
            RuntimeError: the sites have different thresholds.
        """
        count, logarithms = total.tolist()
        mean = logarithms / (self._sites * self._batch)
        if abs(mean - math.log(self.value)) > _NEAR:
            raise RuntimeError(
                f"og.Private: this site clips to {self.value:.4g}, all together to "
                f"{math.exp(mean):.4g} on average: give every site the state_dict() of one"
            )
        share = 0.5 + count / self._batch
        self.value *= math.exp(-self._rate * (share - self._quantile))
