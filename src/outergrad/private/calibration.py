"""Inverse of the ledger: the noise that a training needs for a given ε."""

from __future__ import annotations

from collections.abc import Callable
from math import log

from outergrad.core.transport import Sums
from outergrad.private import accounting
from outergrad.private.accounting import LARGEST, Accountant, Adjacency
from outergrad.private.observers import Observer, noise_seen
from outergrad.private.sampling import Poisson, Sampling

ERROR = 1e-3
"""By how much the noise may be larger than it must be."""
_MOST_NOISE = 1e6
_UP_TO = LARGEST / 2
"""Largest ε by PLD: RDP's bound, by which PLD's is given up, is up to twice as large."""


def noise_for(
    epsilon: float,
    delta: float,
    rate: float | Sampling,
    steps: int,
    *,
    sites: int = 1,
    sums: Sums = "open",
    observer: Observer = "model",
    colluding: int = 1,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_or_remove",
) -> float:
    """Returns the least noise σ with which so many steps stay within ε.

    Choose the noise by it, instead of trying. It takes some ten computations of ε.

    Args:
        epsilon: ε; by PLD 50 at most.
        delta: δ.
        rate: q of Poisson batches, or how batches are drawn.
        steps: steps of the training.
        sites: S, how many sites add noise.
        sums: who sees what a site sends, as for `Release`.
        observer: whose ε it is.
        colluding: how many sites put together what they know.
        accountant: "pld" or "rdp".
        adjacency: "add_or_remove" or "replace".

    Returns:
        σ, standard deviation of the noise in the sum over all sites, over the clip. What the
        observer does not know of it is at most 1e-3 above the least.

    Raises:
        ImportError: dp-accounting is not installed.
        ValueError: an argument is not allowed, or no noise up to 1e6 is enough.
    """
    if not 0 < epsilon < float("inf"):
        raise ValueError(f"epsilon must be above 0, and finite, not {epsilon!r}")
    if accountant == "pld" and epsilon > _UP_TO:
        raise ValueError(f"epsilon must be {_UP_TO:g} at most by PLD: pass accountant='rdp'")
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, not {steps!r}")
    sampling = Poisson(rate) if isinstance(rate, int | float) else rate
    share = noise_seen(1.0, observer, sites=sites, sums=sums, colluding=colluding)

    def excess(noise: float) -> float:
        """Logarithm of how far ε is too large: nearly a straight line in a small bracket."""
        spent = {(noise, sampling): sampling.turns(steps)}
        found = accounting.epsilon(spent, delta, accountant=accountant, adjacency=adjacency)
        return log(min(max(found, 1e-9), 1e9) / epsilon)

    return _least(excess) / share


def _least(excess: Callable[[float], float]) -> float:
    """Returns the noise from which on there is no excess, by bisection with interpolation."""
    from scipy.optimize import brentq  # dp-accounting has it

    low, high = _bracket(excess)
    found = float(brentq(excess, low, high, xtol=ERROR / 2))
    return found if excess(found) <= 0 else found + ERROR / 2


def _bracket(excess: Callable[[float], float]) -> tuple[float, float]:
    high = 1.0
    while excess(high) > 0:
        high *= 2
        if high > _MOST_NOISE:
            raise ValueError(
                f"no noise up to {_MOST_NOISE:g} is enough (RDP has no bound near 0): choose a "
                f"larger epsilon or delta, or accountant='pld'"
            )
    low = high / 2
    while excess(low) <= 0:
        low, high = low / 2, low
    return low, high
