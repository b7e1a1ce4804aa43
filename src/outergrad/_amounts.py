"""Numbers formatted for people: few digits, and a unit that fits."""

from __future__ import annotations

import math
from collections.abc import Callable

Write = Callable[[float], str]
_three: Write = "{:.3g}".format


def short(value: float, digits: int = 3) -> str:
    """Formats a number with about `digits` digits: 0.0412, 4.12, 412, 41,200, 4.1e-05."""
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 2}e}"
    exponent = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def plain(value: float) -> str:
    """Formats a number with up to four significant digits: 0.4312, 0.001, 41,200."""
    return short(value, 4) if abs(value) >= 1e4 else f"{value:.4g}"


def times(ratio: float) -> str:
    """Formats the ratio of two amounts with two digits: 3.1, 86, 1,200."""
    return short(ratio, 2)


def fold(ratio: float) -> str:
    """Formats a ratio with two digits and a multiplication sign: 3.1 ×."""
    return f"{times(ratio)} \N{MULTIPLICATION SIGN}"


def many(count: int, word: str) -> str:
    """Formats a count with its noun: 1 thread, 2 threads."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def amount(number: float, unit: str = "B", write: Write = _three) -> str:
    """Formats a number with a decimal prefix, before which `write` is used: 512 B, 12.3 MB."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5 or prefix == "T":
            break
        number /= 1000
    return f"{number:.0f} {unit}" if not prefix else f"{write(number)} {prefix}{unit}"


def seconds(value: float, write: Write = _three) -> str:
    """Formats seconds in a unit that fits, the number by `write`: 850 µs, 12.3 ms, 1.25 s."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if value * factor < 999.5:
            return f"{write(value * factor)} {unit}"
    return f"{write(value)} s"


def milliseconds(value_s: float) -> str:
    """Formats seconds as milliseconds without the unit, for a column: 0.8, 12.3, 1,250."""
    return f"{1e3 * value_s:,.{0 if value_s >= 1 else 1}f}"


def duration(value_s: float) -> str:
    """Formats seconds in their two largest units: 40 s, 2m 06s, 1h 02m, 3d 04h."""
    s = max(0, int(value_s))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60}m {s % 60:02}s"
    if s < 86400:
        return f"{s // 3600}h {s // 60 % 60:02}m"
    return f"{s // 86400}d {s // 3600 % 24:02}h"
