"""Whether one of two ways is faster: medians of pairs of steps, and what can be said of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, inf
from statistics import median

RISK = 0.01
"""How likely the lower bound is too high, at most."""


def lower_bound(gains: Sequence[float]) -> float:
    """What the median gain is at least, whatever their distribution; -inf of too few.

    By order statistics: were the median below the k-th smallest of n, at most k - 1 of n tosses of
    a fair coin had been heads.
    """
    tosses, below, k = len(gains), 0.0, 0
    while (below := below + comb(tosses, k) / 2**tosses) <= RISK:
        k += 1
    return sorted(gains)[k - 1] if k else -inf


def slowest_site(seconds_SN: Sequence[Sequence[float]]) -> Sequence[float]:
    """The steps (N) of the site (S) whose median is longest."""
    return max(seconds_SN, key=median)


_ABBA = (*[0] * 8, *[1] * 16, *[0] * 8)
_PAIRS = (*((2 + k, 10 + k) for k in range(5)), *((26 + k, 18 + k) for k in range(5)))
"""Those with two before them that went the same way, and one behind: a change makes the steps
around it longer, and most where all other steps are alike."""
_CHANGED = (8, 9, 24, 25)
"""The two behind each change, which are planned anew."""


def turns() -> Sequence[int]:
    """The steps in which both ways take turns: 0 for the way that is kept, 1 for the other one."""
    return _ABBA


def paired_gains(seconds_N: Sequence[float]) -> list[float]:
    """How many seconds less the other way takes, of the pairs in the steps of `turns`."""
    return [seconds_N[kept] - seconds_N[other] for kept, other in _PAIRS]


def medians(seconds_N: Sequence[float]) -> tuple[float, float]:
    """Of the way that is kept and of the other one, from the steps of `paired_gains`."""
    kept, other = zip(*_PAIRS, strict=True)
    return median(seconds_N[k] for k in kept), median(seconds_N[k] for k in other)


def cost_of_change(seconds_N: Sequence[float]) -> float:
    """How many seconds longer a step behind a change takes, of the steps of `turns`."""
    return median(seconds_N[k] for k in _CHANGED) - sum(medians(seconds_N)) / 2


def cost_of_turns(more_s: float, change_s: float) -> float:
    """How many seconds longer `turns` take than as many steps of the way that is kept.

    Args:
        more_s: that a step of the other way takes longer.
        change_s: that a step behind a change takes longer.
    """
    return len(_ABBA) / 2 * more_s + len(_CHANGED) * change_s
