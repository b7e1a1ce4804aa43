"""Differential privacy: clipped samples, noise shared out among sites, and a ledger of releases."""

from outergrad.private.calibration import noise_for
from outergrad.private.ledger import BudgetSpentError, Ledger, Release, Run
from outergrad.private.samplers import (
    CollateEmpty,
    CyclicPoissonSampler,
    FixedSampler,
    PoissonSampler,
    sampling_of,
)
from outergrad.private.sampling import CyclicPoisson, Fixed, Poisson

__all__ = [
    "BudgetSpentError",
    "CollateEmpty",
    "CyclicPoisson",
    "CyclicPoissonSampler",
    "Fixed",
    "FixedSampler",
    "Ledger",
    "Poisson",
    "PoissonSampler",
    "Release",
    "Run",
    "noise_for",
    "sampling_of",
]
