"""Axes that a reader need not decipher: units, few ticks, plain numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from outergrad_lab.experiments.quantities import QUANTITIES, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_MOST_TICKS = 10
_COUNTED = ("rank", "sites", "iterations")


def prepare(axes: Axes, x: str, y: str, log: Iterable[str], places: Iterable[float]) -> None:
    """Sets scales, ticks and grid; once everything is drawn."""
    axes.set(**{f"{name}scale": "log" for name in log})
    axes.grid(alpha=0.25, linewidth=0.6)
    _ticks(axes.yaxis, y)
    at = sorted(set(places))
    if x in _COUNTED and 0 < len(at) <= _MOST_TICKS:
        _ticks_at(axes.xaxis, at)
    else:
        _ticks(axes.xaxis, x)


def label(name: str) -> str:
    """Of an axis."""
    quantity = QUANTITIES.get(name)
    return f"{quantity.name} (ms)" if quantity and quantity.unit == "ms" else title(name)


def _ticks_at(axis: Axis, places: list[float]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    axis.set_major_locator(FixedLocator(places))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _ticks(axis: Axis, name: str) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    if axis.get_scale() == "log":
        low, high = axis.get_view_interval()
        subs = (1,) if high > 300 * low else (1, 2, 5)
        axis.set_major_locator(LogLocator(subs=subs, numticks=8))
        axis.set_minor_formatter(NullFormatter())
    else:
        whole = name in (*_COUNTED, "step", "epoch")
        axis.set_major_locator(MaxNLocator(6, integer=whole, steps=[1, 2, 2.5, 5, 10]))
    _write(axis, name)


def _write(axis: Axis, name: str) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter

    unit = QUANTITIES[name].unit if name in QUANTITIES else ""
    if unit in ("B", "s"):
        axis.set_major_formatter(EngFormatter(unit))
    elif unit == "%":
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{_plain(100 * value)} %"))
    else:
        axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))


def _plain(value: float) -> str:
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.0e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{round(value, 10):g}"
