"""Noise of which later steps take back a part, so that sums over many steps have less of it."""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

from outergrad.private.noise import Noise, add


def coefficients(bands: int) -> list[float]:
    """Returns the first coefficients of the power series of (1 - x)^(-1/2): 1, 1/2, 3/8, 5/16."""
    found = [1.0]
    for j in range(1, bands):
        found.append(found[-1] * (2 * j - 1) / (2 * j))
    return found


class Banded:
    """Noise w of a site, with C w = ‖c‖ z of independent normal numbers z, by parameter.

    C is the lower triangular Toeplitz matrix over the steps of b bands, c_0 = 1 to c_{b-1}: the
    square root of the matrix of ones, whose product with gradients are the sums that an optimizer
    applies, cut to b bands. So w_t = ‖c‖ z_t - Σ_j c_j w_{t-j}. Where a row takes part once in b
    steps at most, its columns of C do not overlap, and each has the length ‖c‖: a release of
    gradients plus σ w tells of each time that it takes part as much as z σ does of one number.

    Sites add up: C of the sum of their noise is the sum of their normal numbers.

    Source: Choquette-Choo et al., "(Amplified) Banded Matrix Factorization", arXiv 2306.08153; its
    square root Fichtenberger, Henzinger and Upadhyay, arXiv 2202.11205, and Kalinin and Lampert,
    arXiv 2405.13763.

    Args:
        bands: b; b - 1 tensors of the size of a parameter are kept for each.
    """

    def __init__(self, bands: int) -> None:
        self._of_past = coefficients(bands)[1:]
        self._length = math.hypot(*coefficients(bands))
        self._past: dict[str, deque[Tensor]] = {}
        self._sites: int | None = None

    def draw(self, noise: Noise, name: str, like: Tensor, sites: int) -> Tensor:
        """Returns the noise of the next step for a parameter, in its shape.

        Args:
            noise: draws z.
            name: full name of the parameter.
            like: gives shape, dtype and device.
            sites: S, among which noise is shared out.

        Raises:
            RuntimeError: there are more or fewer sites than in the steps before.
        """
        if self._sites not in (None, sites):
            raise RuntimeError(
                f"Private(bands={len(self._of_past) + 1}): the noise of the steps before was "
                f"shared out among {self._sites} sites, and now there are {sites}: call "
                f"private.restart() on every site, and record releases with its new sequence"
            )
        self._sites = sites
        past = self._past.setdefault(name, deque(maxlen=len(self._of_past)))
        own = add(noise, torch.zeros_like(like), self._length)
        for factor, before in zip(self._of_past, past, strict=False):  # fewer in the first steps
            own.sub_(before, alpha=factor)
        past.appendleft(own)
        return own
