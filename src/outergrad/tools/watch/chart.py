"""Curves drawn with block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"


def chart(
    values: Sequence[float],
    width: int,
    height: int = 1,
    *,
    low: float | None = None,
    least_span: float = 0.0,
) -> list[str]:
    """Draws a curve with block characters.

    Args:
        values: values, oldest first; averaged in bins if there are more than columns.
        width: columns.
        height: lines.
        low: value of an empty block; the smallest value unless given.
        least_span: minimum difference between the lowest and the highest block, as a share of the
            largest value, so that small changes look small.

    Returns:
        The lines, from the top, each `width` long.
    """
    means = _binned(values, width) if width > 0 else []
    finite = [v for v in means if math.isfinite(v)] or [0.0]
    bottom, top = min(finite) if low is None else low, max(finite)
    missing = max(0.0, least_span * abs(top) - (top - bottom))
    levels = [_level(v, bottom - missing / 2, top + missing / 2, 8 * height) for v in means]
    rows = [[_block(level - 8 * row) for level in levels] for row in reversed(range(height))]
    return ["".join(row).ljust(width) for row in rows]


def _level(value: float, bottom: float, top: float, levels: int) -> int:
    """Eighths of a block, from 1; 0 if the value is not finite."""
    if not math.isfinite(value):
        return 0
    share = (value - bottom) / (top - bottom) if top > bottom else 0.5
    return 1 + round((levels - 1) * min(1.0, max(0.0, share)))


def _block(level: int) -> str:
    return BLOCKS[min(level, 8) - 1] if level > 0 else " "


def _binned(values: Sequence[float], width: int) -> list[float]:
    count = len(values)
    if count <= width:
        return list(values)
    edges = [i * count // width for i in range(width + 1)]
    bins = (values[a:b] for a, b in pairwise(edges))
    return [sum(b) / len(b) for b in bins]
