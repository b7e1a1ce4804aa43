"""Numbers as a reader likes them, in few columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"


def short(value: float, digits: int = 3) -> str:
    """With so many digits: 0.0412, 4.12, 412, 41,200, 4.1e-05."""
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 2}e}"
    exponent = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def plain(value: float) -> str:
    """With up to four digits: 0.4312, 0.001, 41,200."""
    return short(value, 4) if abs(value) >= 1e4 else f"{value:.4g}"


def amount(number: float, unit: str = "B") -> str:
    """With a prefix: 512 B, 1.20 kB, 12.3 MB."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5 or prefix == "T":
            break
        number /= 1000
    return f"{number:.0f} {unit}" if not prefix else f"{number:.3g} {prefix}{unit}"


def duration(seconds: float) -> str:
    """In its two largest units: 40 s, 2m 06s, 1h 02m, 3d 04h."""
    s = max(0, int(seconds))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60}m {s % 60:02}s"
    if s < 86400:
        return f"{s // 3600}h {s // 60 % 60:02}m"
    return f"{s // 86400}d {s // 3600 % 24:02}h"


def seconds(value: float) -> str:
    """Of a step: 850 µs, 12.3 ms, 1.25 s."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if value * factor < 999.5:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s"


def chart(
    values: Sequence[float],
    width: int,
    height: int = 1,
    *,
    low: float | None = None,
    least_span: float = 0.0,
) -> list[str]:
    """A curve of blocks.

    Args:
        values: oldest first; as many as do not fit are averaged together.
        width: columns.
        height: lines.
        low: what an empty block stands for; the smallest value unless given.
        least_span: difference between the lowest and the highest block at least, as a part of the
            largest value, so that what hardly changes looks like it.

    Returns:
        The lines, from the top, each of the width.
    """
    means = _binned(values, width) if width > 0 else []
    finite = [v for v in means if math.isfinite(v)] or [0.0]
    bottom, top = min(finite) if low is None else low, max(finite)
    missing = max(0.0, least_span * abs(top) - (top - bottom))
    levels = [_level(v, bottom - missing / 2, top + missing / 2, 8 * height) for v in means]
    rows = [[_block(level - 8 * row) for level in levels] for row in reversed(range(height))]
    return ["".join(row).ljust(width) for row in rows]


def _level(value: float, bottom: float, top: float, levels: int) -> int:
    """Eighths of a block, from 1; 0 for what is no number."""
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
