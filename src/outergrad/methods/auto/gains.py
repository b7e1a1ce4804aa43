"""Comparison of two ways by pairs of steps: medians, and a lower bound of the gain."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, inf
from statistics import median

RISK = 0.01
"""Largest probability that the lower bound is too high."""


def lower_bound(gains: Sequence[float]) -> float:
    """Returns a lower bound of the median gain, whatever the distribution; -inf of too few gains.

    By order statistics: if the median were below the k-th smallest of n, at most k - 1 of n tosses
    of a fair coin would have been heads.
    """
    tosses, below, k = len(gains), 0.0, 0
    while (below := below + comb(tosses, k) / 2**tosses) <= RISK:
        k += 1
    return sorted(gains)[k - 1] if k else -inf


def slowest_site(seconds_SN: Sequence[Sequence[float]]) -> Sequence[float]:
    """Returns the step times (N) of the site (S) whose median is longest."""
    return max(seconds_SN, key=median)


_ABBA = (*[0] * 8, *[1] * 16, *[0] * 8)
_PAIRS = (*((2 + k, 10 + k) for k in range(5)), *((26 + k, 18 + k) for k in range(5)))
"""Pairs of a step of the kept way and one of the other way, each with two steps before it and one
behind it of its own way: a change lengthens the steps around it, most if all others are alike."""
_CHANGED = (8, 9, 24, 25)
"""Two steps behind each change of way, which are planned anew."""


def turns() -> Sequence[int]:
    """Returns the way of each step of a comparison: 0 for the kept way, 1 for the other one."""
    return _ABBA


def paired_gains(seconds_N: Sequence[float]) -> list[float]:
    """Returns the seconds that the other way saves, for each pair in the steps of `turns`."""
    return [seconds_N[kept] - seconds_N[other] for kept, other in _PAIRS]


def medians(seconds_N: Sequence[float]) -> tuple[float, float]:
    """Returns the median seconds of the kept way and of the other one, over the pairs of steps."""
    kept, other = zip(*_PAIRS, strict=True)
    return median(seconds_N[k] for k in kept), median(seconds_N[k] for k in other)


def cost_of_change(seconds_N: Sequence[float]) -> float:
    """Returns by how many seconds a step behind a change is longer, from the steps of `turns`."""
    return median(seconds_N[k] for k in _CHANGED) - sum(medians(seconds_N)) / 2


def cost_of_turns(more_s: float, change_s: float) -> float:
    """Returns by how many seconds `turns` take longer than as many steps of the kept way.

    Args:
        more_s: Seconds by which a step of the other way is longer.
        change_s: Seconds by which a step behind a change is longer.
    """
    return len(_ABBA) / 2 * more_s + len(_CHANGED) * change_s
