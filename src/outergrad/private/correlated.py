"""Noise of which later steps take back a part, so that sums over many steps have less of it."""

from __future__ import annotations

import math
import secrets
from collections import deque

import numpy as np
import torch
from torch import Tensor

from outergrad.private.noise import Noise, add


def coefficients(bands: int) -> list[float]:
    """Returns the first coefficients of the power series of (1 - x)^(-1/2): 1, 1/2, 3/8, 5/16."""
    found = [1.0]
    for j in range(1, bands):
        found.append(found[-1] * (2 * j - 1) / (2 * j))
    return found


def noise_in_sums(bands: int, steps: int) -> float:
    """Returns the noise in the sum of the first t steps, as root mean square over t.

    Choose the number of bands by it, times the noise σ that each number of bands takes: an
    optimizer that adds up applies these sums.

    Args:
        bands: b.
        steps: number of steps, over which t goes.

    Returns:
        Its standard deviation, for σ = 1, in units of the clip: that of rows of the matrix of ones
        times C⁻¹, which is a Toeplitz matrix, too.
    """
    c = np.array(coefficients(min(bands, steps)))
    inverse = np.zeros(steps)
    inverse[0] = 1.0
    for t in range(1, steps):
        back = min(t, len(c) - 1)
        inverse[t] = -c[1 : back + 1] @ inverse[t - back : t][::-1]
    variance_T = (inverse.cumsum() ** 2).cumsum()
    return float(np.linalg.norm(c)) * math.sqrt(variance_T.mean())


class Banded:
    """Noise w of a site, with C w = ‖c‖ z of independent normal numbers z, by parameter.

    C is the lower triangular Toeplitz matrix over the steps of b bands, c_0 = 1 to c_{b-1}: the
    square root of the matrix of ones, whose product with gradients are the sums that an optimizer
    applies, cut to b bands. So w_t = ‖c‖ z_t - Σ_j c_j w_{t-j}. Where a row takes part once in b
    steps at most, its columns of C do not overlap, and each has the length ‖c‖: a release of
    gradients plus σ w tells of each time that it takes part as much as z σ does of one number.

    Sites add up: C of the sum of their noise is the sum of their normal numbers.

    A step counts whether or not a site has sent something in it. What it has not, as where its
    backward raised, is drawn later and kept from everybody: what was sent is a part of what could
    have been, and tells no more. Were such a step left out, the rows of the steps around it would
    be less than b steps apart.

    Source: Choquette-Choo et al., "(Amplified) Banded Matrix Factorization", arXiv 2306.08153; its
    square root Fichtenberger, Henzinger and Upadhyay, arXiv 2202.11205, and Kalinin and Lampert,
    arXiv 2405.13763.

    Args:
        bands: b; b - 1 tensors of the size of a parameter are kept for each.

    Attributes:
        sequence: name of the steps that follow each other.
    """

    def __init__(self, bands: int) -> None:
        self.bands = bands
        self._of_past = coefficients(bands)[1:]
        self._length = math.hypot(*coefficients(bands))
        self.restart()

    def restart(self, sequence: str = "") -> None:
        """Begins another sequence, which takes nothing back of the one before.

        Args:
            sequence: its name, by default one that nothing else has.
        """
        self.sequence = sequence or secrets.token_hex(8)
        self._past: dict[str, deque[Tensor]] = {}
        self._drawn: dict[str, int] = {}
        self._steps, self._sites = 0, None

    def begin_step(self) -> None:
        """Counts a step; each parameter's noise is drawn once in it, or later."""
        self._steps += 1

    def draw(self, noise: Noise, name: str, like: Tensor, sites: int) -> Tensor:
        """Returns the noise of this step for a parameter, in its shape.

        Args:
            noise: draws z.
            name: full name of the parameter.
            like: gives shape, dtype and device.
            sites: S, among which noise is shared out.

        Raises:
            RuntimeError: it was drawn in this step before; or there are more or fewer sites than
                in the steps before.
        """
        if self._sites not in (None, sites):
            raise RuntimeError(
                f"Private(bands={self.bands}): the noise of the steps before was "
                f"shared out among {self._sites} sites, and now there are {sites}: call "
                f"private.restart() on every site, and record releases with its new sequence"
            )
        if self._drawn.get(name, 0) >= self._steps:
            raise RuntimeError(
                f"Private(bands={self.bands}): noise for {name!r} is asked for a second time in "
                f"one step, or before the first: a transform around it has to pass begin_step() on"
            )
        self._sites = sites
        own = [self._next(noise, name, like) for _ in range(self._drawn.get(name, 0), self._steps)]
        self._drawn[name] = self._steps
        return own[-1]

    def _next(self, noise: Noise, name: str, like: Tensor) -> Tensor:
        past = self._past.setdefault(name, deque(maxlen=len(self._of_past)))
        own = add(noise, torch.zeros_like(like), self._length)
        for factor, before in zip(self._of_past, past, strict=False):  # fewer in the first steps
            own.sub_(before, alpha=factor)
        past.appendleft(own)
        return own
