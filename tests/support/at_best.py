"""Figures that a busy machine makes smaller, and nothing makes larger."""

from __future__ import annotations

from collections.abc import Callable


def at_best(measure: Callable[[], float], enough: float, tries: int = 10) -> float:
    """The largest of some figures; none is measured any more once one is enough."""
    best = measure()
    for _ in range(tries - 1):
        if best >= enough:
            break
        best = max(best, measure())
    return best
