"""Figures of an experiment: lines over panels, drawn by seaborn."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outergrad._whole_files import whole_file
from outergrad.core.packages import require
from outergrad_lab.axes import draw_line, readable
from outergrad_lab.experiments.asked import Asked, ask, groups
from outergrad_lab.experiments.frames import OF_METHOD, Result, finals, varied
from outergrad_lab.experiments.quantities import QUANTITIES, heading, title
from outergrad_lab.labels import Method, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame


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


_WIDTH, _DPI = 8.0, 150
_HEIGHTS = {1: 4.0, 2: 3.1, 3: 2.5}
"""Height in inches of a row of panels, by the number of columns (at most 3)."""
_OWN_RANGE = {"data", "model", "workload", "layer"}
"""Settings for which panels need not share a y axis."""
_WINDOWS = 40
"""Number of windows of the running mean in a training."""
_THEME: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.markersize": 5,
}


def write_figures(
    wanted: Iterable[Mapping[str, Any]], results: Iterable[Result], folder: Path
) -> list[Path]:
    """Draws NAME.png for each figure; a figure without any result is left out.

    A picture has its title in its metadata, too.

    Raises:
        ImportError: pandas or seaborn is missing.
        RecipeError: A figure names what no result has.
    """
    require("pandas", "seaborn")
    results = list(results)
    found = [(folder / f"{one['name']}.png", ask(one, results)) for one in wanted]
    return [_write(asked, results, path) for path, asked in found if len(asked.points)]


def _write(asked: Asked, results: Sequence[Result], path: Path) -> Path:
    from matplotlib import rc_context

    with rc_context(_THEME), whole_file(path) as file:
        about = {"Title": asked.title}
        draw(asked, results).savefig(file, format="png", dpi=_DPI, metadata=about)
    return path


def draw(asked: Asked, results: Sequence[Result]) -> Figure:
    """Draws all panels, and a legend below or beside them."""
    from matplotlib.figure import Figure

    panels = groups(asked.points, asked.panels)
    places, rows, columns = places_of(list(panels))
    of_rows = _lines_of_rows(asked, list(panels.values()), [row for row, _ in places])
    together = one_legend([list(map(asked.line, lines)) for lines in of_rows])
    everywhere = list(groups(asked.points, asked.lines))
    looks = [asked.looks(everywhere if together else lines) for lines in of_rows]
    usual = _HEIGHTS[min(columns, 3)]
    heights = [usual if together else max(usual, beside_height(list(found))) for found in looks]
    below = legend_height(list(looks[0])) if together else 0
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.5 + below), layout="constrained")
    share = "row" if _OWN_RANGE.intersection(asked.panels) else "all"
    shape = {"squeeze": False, "height_ratios": heights}
    grid = figure.subplots(rows, columns, sharex="col", sharey=share, **shape)
    for (panel, points), place in zip(panels.items(), places, strict=True):
        axes = grid[place]
        _draw_lines(axes, asked, points, looks[place[0]])
        _draw_levels(axes, asked, dict(zip(asked.panels, panel, strict=True)), results)
        axes.set(title=", ".join(map(heading, asked.panels, panel)), xlabel="", ylabel="")
        prepare(axes, asked.x, asked.y, asked.log, points[asked.x])
    spent = asked.course and asked.x == "sent_bytes"
    name_axes(grid, set(places), label("spent_bytes" if spent else asked.x), label(asked.y))
    figure.suptitle(asked.title, fontsize=11, fontweight="bold")
    add_legends(figure, grid, together=together)
    return figure


def _lines_of_rows(
    asked: Asked, panels: Sequence[DataFrame], rows: Sequence[int]
) -> list[list[tuple[Any, ...]]]:
    from pandas import concat

    by_row = [
        concat([points for points, at in zip(panels, rows, strict=True) if at == row])
        for row in sorted(set(rows))
    ]
    return [list(groups(points, asked.lines)) for points in by_row]


def _draw_lines(axes: Axes, asked: Asked, points: DataFrame, looks: Mapping[str, Style]) -> None:
    """Draws lines through the means over seeds, in a band from the least to the most."""
    for key, rows in groups(points, asked.lines).items():
        name = asked.line(key)
        style = looks[name]
        draw_line(
            axes,
            _course(axes, rows, asked, style) if asked.course else _outcomes(rows, asked),
            asked.x,
            asked.y,
            style | {"marker": ""} if asked.course else style,
            errorbar=lambda values: (min(values), max(values)),
            err_kws={"alpha": 0.15, "linewidth": 0},
            label=name,
        )


def _course(axes: Axes, rows: DataFrame, asked: Asked, style: Style) -> DataFrame:
    """Returns a point per seed and step; for training loss a running mean, over the plain loss."""
    by_seed = rows.pivot_table(index="step", columns="seed", values=asked.y)
    at = rows.groupby("step")[asked.x].mean()
    if asked.y == "loss":
        axes.plot(at, by_seed.mean(axis=1), color=style["color"], linewidth=0.5, alpha=0.2)
        window = max(1, len(by_seed) // _WINDOWS)
        by_seed = by_seed.rolling(window, center=True, min_periods=1).mean()
    return by_seed.set_axis(at).melt(ignore_index=False, value_name=asked.y).reset_index()


def _outcomes(rows: DataFrame, asked: Asked) -> DataFrame:
    """Returns a point per task; a measured x is the mean of tasks that differ only in the seed."""
    if asked.x not in QUANTITIES:
        return rows
    alike = rows.groupby(varied(rows) or ["kind"], dropna=False, observed=True)
    return rows.assign(**{asked.x: alike[asked.x].transform("mean")})


def _draw_levels(
    axes: Axes, asked: Asked, panel: Mapping[str, Any], results: Sequence[Result]
) -> None:
    if not asked.references:
        return
    frame = finals(results)
    # A reference has no family and no rank of its own.
    for name in set(panel).intersection(frame.columns).difference(OF_METHOD):
        frame = frame[frame[name] == panel[name]]
    for method in asked.references:
        y = frame[frame["method"] == method]["train_loss" if asked.y == "loss" else asked.y].mean()
        if y == y:
            look = {"color": Method.parse(method).look["color"], "linestyle": (0, (5, 3))}
            axes.axhline(y, label=Method.parse(method).label, linewidth=1.2, zorder=1.5, **look)
