"""Differential privacy: clipped samples, noise shared out among sites, and a ledger of releases."""

from outergrad.core.errors import BudgetSpentError
from outergrad.private.calibration import noise_for
from outergrad.private.ledger import Ledger, Release, Run
from outergrad.private.samplers import (
    CollateEmpty,
    CyclicPoissonSampler,
    FixedSampler,
    PoissonSampler,
    sampling_of,
)
from outergrad.private.sampling import CyclicPoisson, Fixed, Poisson
from outergrad.private.spent import PrivacySpent

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
    "PrivacySpent",
    "Release",
    "Run",
    "noise_for",
    "sampling_of",
]
