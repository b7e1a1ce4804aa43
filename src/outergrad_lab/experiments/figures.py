"""The figures of an experiment: lines over panels, drawn by seaborn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outergrad._whole_files import whole_file
from outergrad.report.recording import require
from outergrad_lab.axes import draw_line
from outergrad_lab.experiments.frames import OF_METHOD, Result, curves, finals, ranks, varied
from outergrad_lab.experiments.hours import around_hub
from outergrad_lab.experiments.links import over_links
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
from outergrad_lab.experiments.sweeps import with_best
from outergrad_lab.experiments.wanted import chosen, groups, in_order, names
from outergrad_lab.labels import LOOKS, OTHER, USUAL, Method, Style, told_apart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

_WIDTH, _DPI = 8.0, 150
_HEIGHTS = {1: 4.0, 2: 3.1, 3: 2.5}
"""Inches of a row of panels, by their number."""
_OWN_RANGE = {"data", "model", "workload", "layer"}
"""Panels that differ in these need not share an axis."""
_COURSE = ("step", "epoch", "seconds", "hours")
_OF_COURSE = ("loss", "test_loss", "accuracy", "auc")
_WINDOWS = 40
"""A training has so many windows of the running mean."""
_MARKERS = "os^vDPXd"
_THEME: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.markersize": 5,
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a figure's YAML asks for, and the points that the results have for it.

    Attributes:
        title: Of the figure.
        x, y: Names of quantities or settings.
        lines, panels: What lines and panels differ in.
        called: What the legend calls each method; others are not drawn. Where empty, all are.
        log: Which axes are logarithmic.
        references: Methods whose outcomes are levels to compare with.
        course: Whether lines go over steps, rather than through what came out.
        points: Rows of `curves`, `ranks` or `finals`.
    """

    title: str
    x: str
    y: str
    lines: list[str]
    panels: list[str]
    called: Mapping[str, str]
    log: list[str]
    references: list[str]
    course: bool
    points: DataFrame

    def line(self, key: tuple[Any, ...]) -> str:
        """What the legend calls a line."""
        parts = zip(self.lines, key, strict=True)
        return ", ".join(self.called.get(value) or heading(name, value) for name, value in parts)

    def looks(self, keys: Iterable[tuple[Any, ...]]) -> dict[str, Style]:
        """How lines look, by what the legend calls them."""
        first = {self.line(key): key for key in reversed(list(keys))}
        named = dict(reversed(first.items()))
        return dict(zip(named, styles(self.lines, list(named.values())), strict=True))


def write_figures(
    wanted: Iterable[Mapping[str, Any]], results: Iterable[Result], folder: Path
) -> list[Path]:
    """Draws NAME.png for each; one that no result has anything for is left out.

    A picture carries its title in its metadata too.

    Raises:
        ImportError: pandas or seaborn is missing.
        RecipeError: One names what no result has.
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


def ask(wanted: Mapping[str, Any], results: Sequence[Result]) -> Asked:
    """Finds the points of a figure; none where no result has what it asks for.

    Raises:
        RecipeError: It names what no result has.
    """
    x, y, lines = wanted["x"], wanted["y"], names(wanted["lines"])
    panels, log, references = (names(wanted.get(n)) for n in ("panels", "log", "references"))
    # Over bytes a method is a course, a family the line through its methods.
    spent = x == "sent_bytes" and y in _OF_COURSE and "method" in lines
    course = x in _COURSE or spent or y == "effective_rank"
    if swept := wanted.get("best"):
        results = with_best(results, swept)
    frame = (ranks if y == "effective_rank" else curves if course else finals)(results)
    if links := names(wanted.get("links")):
        frame = over_links(frame, links)
    if around := wanted.get("around"):
        frame = around_hub(frame, results, around, "step" if course else "steps")
    what, columns = f"figure {wanted['name']}", [*lines, *panels]
    called, where = wanted.get("names") or {}, wanted.get("where") or {}
    if called:
        where = where | {"method": list(called)}
    frame = chosen(what, frame, [x, y, *columns], where)
    if called:
        order = {method: at for at, method in enumerate(called)}
        frame = frame.sort_values("method", key=lambda methods: methods.map(order), kind="stable")
    x = "step" if x == "epoch" and frame["epoch"].isna().all() else x
    frame = frame[~frame["method"].isin(references)].dropna(subset=[x, y, *columns])
    for axis in log:
        frame = frame[frame[x if axis == "x" else y] > 0]
    return Asked(
        title=wanted.get("title", wanted["name"]),
        x=x,
        y=y,
        lines=lines,
        panels=panels,
        called=called,
        log=log,
        references=references,
        course=course,
        points=in_order(frame, columns),
    )


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
    """The lines that are in any panel of each row."""
    from pandas import concat

    by_row = [
        concat([points for points, at in zip(panels, rows, strict=True) if at == row])
        for row in sorted(set(rows))
    ]
    return [list(groups(points, asked.lines)) for points in by_row]


def _draw_lines(axes: Axes, asked: Asked, points: DataFrame, looks: Mapping[str, Style]) -> None:
    """A line through the means over seeds, in a band from the least to the most."""
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
    """A point per seed and step; of the training loss a running mean, with the loss behind it."""
    by_seed = rows.pivot_table(index="step", columns="seed", values=asked.y)
    at = rows.groupby("step")[asked.x].mean()
    if asked.y == "loss":
        axes.plot(at, by_seed.mean(axis=1), color=style["color"], linewidth=0.5, alpha=0.2)
        window = max(1, len(by_seed) // _WINDOWS)
        by_seed = by_seed.rolling(window, center=True, min_periods=1).mean()
    return by_seed.set_axis(at).melt(ignore_index=False, value_name=asked.y).reset_index()


def _outcomes(rows: DataFrame, asked: Asked) -> DataFrame:
    """A point per task; what was measured as x is the mean of tasks that differ in the seed."""
    if asked.x not in QUANTITIES:
        return rows
    alike = rows.groupby(varied(rows) or ["kind"], dropna=False, observed=True)
    return rows.assign(**{asked.x: alike[asked.x].transform("mean")})


def _draw_levels(
    axes: Axes, asked: Asked, panel: Mapping[str, Any], results: Sequence[Result]
) -> None:
    """What the methods of reference came to: horizontal lines."""
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


def styles(along: list[str], keys: Sequence[tuple[Any, ...]]) -> list[Style]:
    """Methods and families look the same everywhere; others go from dark to light."""
    from seaborn import color_palette

    if "method" in along:
        at = along.index("method")
        return told_apart([Method.parse(key[at]).look for key in keys])
    if "family" in along:
        at = along.index("family")
        return told_apart([USUAL | LOOKS.get(key[at], OTHER) for key in keys])
    colours = color_palette("viridis", len(keys)).as_hex()
    both = zip(colours, cycle(_MARKERS), strict=False)
    return [USUAL | {"color": colour, "marker": marker} for colour, marker in both]
