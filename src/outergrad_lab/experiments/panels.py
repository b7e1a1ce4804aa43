"""Panels of a figure: their places, the labels of their axes, and their legends."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from outergrad_lab.axes import readable
from outergrad_lab.experiments.quantities import QUANTITIES, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BESIDE_CHARACTERS = 36
_LEGEND_CHARACTERS = 105
_LEGEND_ROW, _USUAL_ROWS = 0.18, 6
"""Inches of a legend's row, and the number of rows that a figure has space for."""
_BESIDE_LINE, _BESIDE_GAP, _TITLE = 0.12, 0.05, 0.35
"""Inches of a legend beside a row of panels: a line, the gap between entries, and a title."""
_MOST_TICKS = 10
_COUNTED = ("rank", "sites", "iterations")


def places_of(panels: Sequence[tuple[Any, ...]]) -> tuple[list[tuple[int, int]], int, int]:
    """Returns each panel's row and column, and their counts; of two settings the first is down."""
    if len(panels[0]) != 2:
        columns = 2 if len(panels) == 4 else min(len(panels), 3)
        places = [divmod(at, columns) for at in range(len(panels))]
        return places, math.ceil(len(panels) / columns), columns
    down, right = (list(dict.fromkeys(values)) for values in zip(*panels, strict=True))
    return [(down.index(a), right.index(b)) for a, b in panels], len(down), len(right)


def prepare(axes: Axes, x: str, y: str, log: Iterable[str], places: Iterable[float]) -> None:
    """Sets scales, ticks and grid, after everything is drawn."""
    axes.set(**{f"{name}scale": "log" for name in log})
    axes.grid(alpha=0.25, linewidth=0.6)
    at = sorted(set(places)) if x in _COUNTED else []
    for axis, name in ((axes.yaxis, y), (axes.xaxis, x)):
        unit = QUANTITIES[name].unit if name in QUANTITIES else ""
        shown = at if name == x and len(at) <= _MOST_TICKS else []
        readable(axis, unit, whole=name in (*_COUNTED, "step", "epoch"), places=shown)


def label(name: str) -> str:
    """Returns the label of an axis."""
    unit = {"ms": " (ms)", "hours": " (h)"}.get(name, "")
    return title(name) + unit


def name_axes(grid: Any, filled: set[tuple[int, int]], x: str, y: str) -> None:
    """Removes empty panels; the lowest panel of a column gets the label of the x axis."""
    for column in range(len(grid[0])):
        rows = [row for row in range(len(grid)) if (row, column) in filled]
        for row in set(range(len(grid))).difference(rows):
            grid[row, column].remove()
        # Seaborn hides the label of what has axes below it, also where these were removed.
        grid[max(rows), column].set_xlabel(x, visible=True)
        grid[max(rows), column].xaxis.set_tick_params(labelbottom=True)
    for axes in grid[:, 0]:
        axes.set_ylabel(y)


def one_legend(rows: Sequence[Sequence[str]]) -> bool:
    """True if most lines are in every row of panels, so that one legend below suffices."""
    lines = [set(row) for row in rows]
    return 2 * len(set.intersection(*lines)) >= len(set.union(*lines))


def add_legends(figure: Figure, grid: Any, *, together: bool) -> None:
    """Adds one legend below all panels, or one beside each row."""
    rows = [{k: v for axes in row if axes.figure for k, v in _legend(axes)} for row in grid]
    if together:
        handles = {name: handle for row in rows for name, handle in row.items()}
        where = {"loc": "outside lower center", "ncols": _legend_columns(list(handles))}
        figure.legend(handles.values(), map(_wrapped, handles), **where)
        return
    for row, handles in zip(grid, rows, strict=True):
        last = [axes for axes in row if axes.figure][-1]
        where = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "fontsize": 7}
        last.legend(
            handles.values(), [_wrapped(name, _BESIDE_CHARACTERS) for name in handles], **where
        )


def beside_height(labels: Sequence[str]) -> float:
    """Returns the inches for a legend beside a row and the title of its panel."""
    lines = sum(_wrapped(label, _BESIDE_CHARACTERS).count("\n") + 1 for label in labels)
    return _BESIDE_LINE * lines + _BESIDE_GAP * (len(labels) + 1) + _TITLE


def legend_height(labels: Sequence[str]) -> float:
    """Returns the inches that a legend below needs in excess of a usual one."""
    more = sum(_wrapped(label).count("\n") for label in labels)
    rows = math.ceil(len(labels) / _legend_columns(labels)) + more
    return _LEGEND_ROW * max(0, rows - _USUAL_ROWS)


def _legend_columns(labels: Sequence[str]) -> int:
    columns = max(1, _LEGEND_CHARACTERS // (max(map(len, labels)) + 7))
    return min(columns, len(labels))


def _wrapped(label: str, width: int = _LEGEND_CHARACTERS - 7) -> str:
    return textwrap.fill(label, width, subsequent_indent="    ")


def _legend(axes: Axes) -> Iterable[tuple[str, Any]]:
    handles, labels = axes.get_legend_handles_labels()
    return zip(labels, handles, strict=True)
