"""Recent values of one figure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

RECENT = 1024


class Series:
    """The last values, each of a step."""

    def __init__(self) -> None:
        self._points: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def add(self, step: int, value: float) -> None:
        """Takes the value of a step."""
        self._points.append((step, value))

    def forget_from(self, step: int) -> None:
        """Forgets what is of this step or a later one."""
        while self._points and self._points[-1][0] >= step:
            self._points.pop()

    def by_step(self) -> dict[int, float]:
        """The values; of a step that came twice the later one."""
        return dict(self._points)

    def __iter__(self) -> Iterator[float]:
        """The values, oldest first."""
        return (value for _, value in self._points)


def mean_over(series: list[Series]) -> list[float]:
    """The means of the steps that all of them have, oldest first; else the first's values."""
    if len(series) == 1:
        return list(series[0])
    points = [s.by_step() for s in series]
    common = [step for step in points[0] if all(step in p for p in points)] if points else []
    if not common:
        return list(series[0]) if series else []
    return [sum(p[step] for p in points) / len(points) for step in common]
