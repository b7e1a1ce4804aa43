"""The figures of an experiment, as pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outergrad._whole_files import whole_file
from outergrad.report.recording import require
from outergrad_lab.experiments.axes import label, prepare
from outergrad_lab.experiments.frames import Result
from outergrad_lab.experiments.lines import Level, Line, Panel, Picture, picture
from outergrad_lab.experiments.wanted import names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _DPI = 8.0, 150
_HEIGHTS = {1: 4.0, 2: 3.1, 3: 2.5}
"""Inches of a row of panels, by their number."""
_LEGEND_CHARACTERS = 105
_OWN_RANGE = {"data", "model", "workload", "layer"}
"""Panels that differ in these need not share an axis."""
_LOOK: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.markersize": 5,
    "svg.fonttype": "none",
}


def write_figures(
    wanted: Iterable[Mapping[str, Any]], results: Iterable[Result], folder: Path
) -> list[Path]:
    """Draws NAME.png for each; one that no result has anything for is left out.

    A picture carries its title in its metadata too.

    Raises:
        ImportError: pandas or matplotlib is missing.
        RecipeError: One names what no result has.
    """
    require("pandas", "matplotlib", extras="reproduce")
    results = list(results)
    found = [(figure, picture(figure, results)) for figure in wanted]
    return [_write(figure, made, folder) for figure, made in found if made.panels]


def _write(wanted: Mapping[str, Any], made: Picture, folder: Path) -> Path:
    from matplotlib import rc_context

    path = folder / f"{wanted['name']}.png"
    title = wanted.get("title", wanted["name"])
    with rc_context(_LOOK), whole_file(path) as file:
        draw(wanted, made).savefig(file, format="png", dpi=_DPI, metadata={"Title": title})
    return path


def draw(wanted: Mapping[str, Any], made: Picture) -> Figure:
    """Draws all panels of a figure, and a legend below or beside them."""
    from matplotlib.figure import Figure

    across = names(wanted.get("panels"))
    rows, columns = _shape(across, made.panels)
    height = rows * _HEIGHTS[min(columns, 3)] + 0.5
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    own = bool(_OWN_RANGE.intersection(across))
    grid = figure.subplots(
        rows, columns, squeeze=False, sharex="col", sharey="row" if own else "all"
    )
    places = _places(across, made.panels, columns)
    for panel in made.panels:
        _draw(grid[places[panel.place]], panel, made, names(wanted.get("log")))
    _close_below(grid, set(places.values()), label("spent_bytes" if made.spent else made.x))
    for axes in grid[:, 0]:
        axes.set_ylabel(label(made.y))
    figure.suptitle(wanted.get("title", wanted["name"]), fontsize=11, fontweight="bold")
    _add_legends(figure, grid)
    return figure


def _shape(across: Sequence[str], panels: Sequence[Panel]) -> tuple[int, int]:
    if len(across) == 2:
        return len({panel.place[0] for panel in panels}), len({panel.place[1] for panel in panels})
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    return math.ceil(len(panels) / columns), columns


def _places(
    across: Sequence[str], panels: Sequence[Panel], columns: int
) -> dict[tuple[Any, ...], tuple[int, int]]:
    """Row and column of each: of two names the first goes down, the second across."""
    if len(across) != 2:
        return {panel.place: divmod(at, columns) for at, panel in enumerate(panels)}
    down, right = (list(dict.fromkeys(panel.place[n] for panel in panels)) for n in (0, 1))
    return {p.place: (down.index(p.place[0]), right.index(p.place[1])) for p in panels}


def _close_below(grid: Any, filled: set[tuple[int, int]], name: str) -> None:
    """Removes panels that are not there; the lowest of a column says its x axis."""
    for column in range(len(grid[0])):
        rows = [row for row in range(len(grid)) if (row, column) in filled]
        for row in set(range(len(grid))).difference(rows):
            grid[row, column].remove()
        lowest = grid[max(rows), column]
        lowest.set_xlabel(name)
        lowest.xaxis.set_tick_params(labelbottom=True)


def _draw(axes: Axes, panel: Panel, made: Picture, log: Sequence[str]) -> None:
    for line in panel.lines:
        _draw_line(axes, line, dotted=not made.course)
    for level in panel.levels:
        _draw_level(axes, level)
    axes.set_title(panel.title)
    prepare(axes, made.x, made.y, log, (x for line in panel.lines for x in line.x))


def _draw_line(axes: Axes, line: Line, *, dotted: bool) -> None:
    style: dict[str, Any] = line.style if dotted else line.style | {"marker": ""}
    colour, width = style["color"], style["linewidth"]
    if line.raw is not None:
        axes.plot(line.x, line.raw, color=colour, linewidth=0.5, alpha=0.2)
    if (line.low < line.high).any():
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(line.x, line.y, label=line.label, zorder=2 + 1 / width, **style)


def _draw_level(axes: Axes, level: Level) -> None:
    look = {"color": level.style["color"], "linewidth": 1.2, "linestyle": (0, (5, 3))}
    axes.axhline(level.y, label=level.label, zorder=1.5, **look)


def _add_legends(figure: Figure, grid: Any) -> None:
    """One below all, or where rows have other lines, one beside each row."""
    grid = [[axes for axes in row if axes.figure] for row in grid]
    rows = list(map(_handles, grid))
    together = {name: handle for row in rows for name, handle in row.items()}
    if all(row.keys() == together.keys() for row in rows):
        columns = max(1, _LEGEND_CHARACTERS // (max(map(len, together), default=0) + 7))
        figure.legend(
            together.values(),
            together,
            loc="outside lower center",
            ncols=min(columns, len(together)),
        )
        return
    for row, handles in zip(grid, rows, strict=True):
        row[-1].legend(
            handles.values(), handles, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7.5
        )


def _handles(row: Iterable[Axes]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for axes in row:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    return found
