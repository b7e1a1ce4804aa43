"""Lines and axes of plots that are easy to read: units, few ticks, plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from pandas import DataFrame


def draw_line(
    axes: Axes, rows: DataFrame, x: str, y: str, look: Mapping[str, Any], **more: Any
) -> None:
    """Draws a line through the means, without a legend; wide lines lie below narrow ones.

    Args:
        axes: Axes to draw in.
        rows: Data with columns `x` and `y`.
        x: Name of the horizontal column.
        y: Name of the vertical column.
        look: Colour, marker, and so on.
        more: Further arguments of `seaborn.lineplot`.
    """
    from seaborn import lineplot

    style = {"markeredgecolor": look["color"], "zorder": 2 + 1 / look["linewidth"], **look}
    lineplot(rows, x=x, y=y, legend=False, ax=axes, **style, **more)


def readable(axis: Axis, unit: str, *, whole: bool = False, places: Sequence[float] = ()) -> None:
    """Sets an axis's ticks and their labels. Call it once the scale is set and everything is drawn.

    Args:
        axis: Linear or logarithmic axis.
        unit: "B" and "s" take prefixes, as 20 ms; "%" is for shares; others are not written.
        whole: Whether ticks are whole numbers only.
        places: Positions of the ticks; chosen automatically if empty.
    """
    from matplotlib import ticker

    if places:
        axis.set_major_locator(ticker.FixedLocator(places))
        axis.set_minor_locator(ticker.NullLocator())
    elif axis.get_scale() == "log":
        low, high = axis.get_view_interval()
        subs = (1,) if high > 300 * low else (1, 2, 5)
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=8))
        axis.set_minor_formatter(ticker.NullFormatter())
    else:
        steps = [1, 2, 2.5, 5, 10]
        axis.set_major_locator(ticker.MaxNLocator(6, integer=whole, steps=steps))
    if unit in ("B", "s"):
        axis.set_major_formatter(ticker.EngFormatter(unit))
    elif unit == "%":
        axis.set_major_formatter(lambda value, _: f"{100 * value:.6g} %")
    else:
        axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
