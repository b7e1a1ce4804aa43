"""Quantiles of distributions that are fitted to positive numbers, from few sums over them.

Source: arXiv 2101.10761 (SIDCo), where these are fitted to the magnitudes of gradients: signed
entries then follow the double exponential, double gamma and double generalised Pareto distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Fit = Literal["exponential", "gamma", "pareto"]
Quantile = Callable[[Tensor, float], float]

_NEWTON_STEPS = 4
_HALVINGS = 60
_LEAST_SPREAD = 1e-6
"""Smallest spread assumed, so that equal numbers have a quantile in every fit."""


def exponential_quantile(x_M: Tensor, share: float) -> float:
    """Returns the value that a share of a fitted exponential distribution exceeds.

    Its mean μ is set to that of the numbers, the maximum-likelihood estimate.
    `exp(-t/μ) = share` gives `t = μ log(1/share)`.

    Args:
        x_M: positive, (M,), M at least 1.
        share: in (0, 1].
    """
    return _mean(x_M) * math.log(1 / share)


def pareto_quantile(x_M: Tensor, share: float) -> float:
    """Returns the value that a share of a fitted generalised Pareto distribution exceeds.

    Arguments as for `exponential_quantile`. With shape ξ and scale σ the mean is `μ = σ/(1-ξ)` and
    the variance `v = μ²/(1-2ξ)`. Solved for them: `ξ = (1 - μ²/v)/2` and `σ = μ(1-ξ)`.
    `(1 + ξt/σ)^(-1/ξ) = share` gives `t = σ/ξ (share^(-ξ) - 1)`, and as for an exponential
    distribution where ξ is zero.
    """
    mean = _mean(x_M)
    variance = float(x_M.double().var(correction=0)) / mean**2
    shape = (1 - 1 / max(variance, _LEAST_SPREAD)) / 2
    scale = mean * (1 - shape)
    log_share = math.log(share)
    if abs(shape * log_share) < _LEAST_SPREAD:
        return -scale * log_share
    return scale / shape * math.expm1(-shape * log_share)


def gamma_quantile(x_M: Tensor, share: float) -> float:
    """Returns the value that a share of a fitted gamma distribution exceeds.

    Arguments as for `exponential_quantile`. The mean is that of the numbers. The shape α is the
    maximum-likelihood estimate: it solves `log α - ψ(α) = s` with `s = log(mean x) - mean(log x)`.
    The quantile solves `Q(α, αt/mean) = share`, Q the upper regularised incomplete gamma function,
    by bisection; the paper has a formula for a bound on it, which is 20% and more off at large
    shares.
    """
    mean = _mean(x_M)
    spread = math.log(mean) - _mean(x_M.log())
    shape = _gamma_shape(max(spread, _LEAST_SPREAD))
    return mean / shape * _gamma_point(shape, share)


def _mean(x_M: Tensor) -> float:
    return float(x_M.mean(dtype=torch.float64))


def _gamma_shape(s: float) -> float:
    """Solves `log α - ψ(α) = s`: a closed approximation, refined by Newton steps in 1/α.

    Source: Minka, "Estimating a Gamma distribution", 2002.
    """
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    for _ in range(_NEWTON_STEPS):
        at = torch.tensor(shape, dtype=torch.float64)
        error = math.log(shape) - float(at.digamma()) - s
        slope = shape - shape**2 * float(at.polygamma(1))
        shape = 1 / (1 / shape + error / slope)
    return shape


def _gamma_point(shape: float, share: float) -> float:
    """Solves `Q(shape, t) = share` for t, searched in log t, since t may be tiny."""
    of = torch.tensor(shape, dtype=torch.float64)
    low, high = -700.0, math.log(shape + 1) + math.log(2 - math.log(share)) + 1
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        point = torch.tensor(math.exp(middle), dtype=torch.float64)
        if float(torch.special.gammaincc(of, point)) > share:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


FITS: dict[Fit, tuple[Quantile, Quantile]] = {
    "exponential": (exponential_quantile, exponential_quantile),
    "gamma": (gamma_quantile, pareto_quantile),
    "pareto": (pareto_quantile, pareto_quantile),
}
"""Quantile functions of each fit: for the magnitudes, and for exceedances in later stages."""
