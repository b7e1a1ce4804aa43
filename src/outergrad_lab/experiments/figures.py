"""Figures of an experiment: lines over panels, drawn by seaborn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outergrad._whole_files import whole_file
from outergrad.report.recording import require
from outergrad_lab.axes import draw_line
from outergrad_lab.experiments.asked import Asked, ask, groups
from outergrad_lab.experiments.frames import OF_METHOD, Result, finals, varied
from outergrad_lab.experiments.panels import (
    add_legends,
    beside_height,
    label,
    legend_height,
    name_axes,
    one_legend,
    places_of,
    prepare,
)
from outergrad_lab.experiments.quantities import QUANTITIES, heading
from outergrad_lab.labels import Method, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

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
    require("pandas", "seaborn", extras="reproduce")
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
