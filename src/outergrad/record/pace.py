"""How often a recorder is told of a step, and how long measuring one may take."""

from __future__ import annotations


def checked(every: int, budget: float) -> tuple[int, float]:
    """Returns the settings of a recorder.

    Raises:
        ValueError: one is out of its range.
    """
    if every < 1:
        raise ValueError(f"every={every!r}; use 1 or more: record every so many-th step")
    if not budget > 0:
        raise ValueError(f"budget={budget!r}; use a share of a step above 0, or math.inf")
    return every, budget
