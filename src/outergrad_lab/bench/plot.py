"""Results as a figure, drawn by seaborn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from matplotlib import rc_context
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from pandas import DataFrame
from seaborn import barplot

from outergrad._amounts import fold
from outergrad._whole_files import whole_file
from outergrad_lab.axes import draw_line, readable
from outergrad_lab.bench.results import LinkResult, Results
from outergrad_lab.bench.table import title
from outergrad_lab.labels import Method, told_apart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW_LINKS = 3
_MS, _MB = "ms per step", "MB sent per step and site"


def plot(results: Results, path: Path) -> None:
    """Draws seconds and bytes, one line or bar per method, into a PNG file."""
    with (
        rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}),
        whole_file(path) as file,
    ):
        draw(results).savefig(file, format="png", dpi=150, bbox_inches="tight")


def draw(results: Results) -> Figure:
    """Returns the figure: curves to a loss; else lines over many links, bars for few."""
    if results.links[0].arrivals:
        return _ways(results)
    return _lines(results) if len(results.links) > FEW_LINKS else _bars(results)


def _lines(results: Results) -> Figure:
    """Draws seconds and bytes over the rate of the link, from the slowest to the unshaped one."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    links = sorted(results.links, key=lambda link: link.rate_bit_per_s or math.inf)
    rows = [(link.link, t.method, t.median_s, t.sent_bytes) for link in links for t in link.timings]
    found = DataFrame(rows, columns=["link", "method", "s", "B"]).replace(
        {"link": {"none": "unshaped"}}
    )
    _draw_lines(left, found, "link", "s")
    _draw_lines(right, found[found["method"] != "alone"], "link", "B")
    for axes, head, unit in ((left, "Time of a step", "s"), (right, "Sent per step and site", "B")):
        axes.set(title=head, ylabel="", yscale="log")
        axes.grid(alpha=0.3)
        readable(axes.yaxis, unit)
    _add_legend(figure, left)
    plan = results.plan
    figure.suptitle(f"{plan['workload']}, {plan['sites']} sites", fontweight="bold")
    return figure


def _bars(results: Results) -> Figure:
    """Draws bars per method, a row per link, labelled with how many times below DDP they are."""
    figure, grid = _grid(results, 0.8 + 0.25 * len(results.links[0].timings))
    for (left, right), link in zip(grid, results.links, strict=True):
        timings = link.timings
        rows = [(t.method, 1e3 * t.median_s, t.sent_bytes / 1e6) for t in timings]
        found = DataFrame(rows, columns=["method", _MS, _MB])
        colours = {t.method: Method.parse(t.method).look["color"] for t in timings}
        _draw_bars(left, found, _MS, colours, [gain(t.ratio_to_ddp) for t in timings])
        _draw_bars(right, found, _MB, colours, [gain(r) for r in byte_ratios(link)])
    return figure


def _draw_bars(
    axes: Axes, found: DataFrame, value: str, colours: dict[str, str], labels: Sequence[str]
) -> None:
    barplot(found, x=value, y="method", hue="method", palette=colours, saturation=1, ax=axes)
    for container, label in zip(axes.containers, labels, strict=True):
        axes.bar_label(cast(BarContainer, container), [label], padding=3)
    told = f"{value}; beside it: how many times less than DDP" if any(labels) else value
    axes.set(xlabel=told, ylabel="")
    axes.margins(x=0.15)


def gain(ratio: float | None) -> str:
    """Formats how many times less than DDP's a value is; empty without DDP or without bytes."""
    return fold(1 / ratio) if ratio else ""


def byte_ratios(link: LinkResult) -> list[float | None]:
    """Returns the ratio of every method's bytes to DDP's."""
    ddp = next((t.sent_bytes for t in link.timings if t.method == "ddp"), None)
    return [t.sent_bytes / ddp if ddp else None for t in link.timings]


def _ways(results: Results) -> Figure:
    """Draws test loss over seconds and over bytes, link by link."""
    figure, grid = _grid(results, 3.6)
    for (left, right), link in zip(grid, results.links, strict=True):
        rows = [
            (one.method, m.seconds, m.sent_bytes, m.loss) for one in link.arrivals for m in one.way
        ]
        found = DataFrame(rows, columns=["method", "time in steps", "sent by a site", "test loss"])
        _draw_lines(left, found, "time in steps", "test loss", marker="")
        found = found[found["method"] != "alone"]
        _draw_lines(right, found, "sent by a site", "test loss", marker="")
        right.set(ylabel="")
        for axes, unit in ((left, "s"), (right, "B")):
            axes.set(xscale="log")
            readable(axes.xaxis, unit)
            axes.axhline(results.plan["until_loss"], color="lightgrey", linestyle=":")
    _add_legend(figure, grid[0][0])
    return figure


def _draw_lines(axes: Axes, found: DataFrame, x: str, y: str, **changes: Any) -> None:
    methods = list(found["method"].unique())
    looks = told_apart([Method.parse(method).look for method in methods])
    for method, look in zip(methods, looks, strict=True):
        rows = found[found["method"] == method]
        draw_line(axes, rows, x, y, look | changes, label=method, errorbar=None)


def _grid(results: Results, height: float) -> tuple[Figure, Any]:
    """Returns a figure with a row per link, under a title that says what was measured."""
    rows = len(results.links)
    figure = Figure(figsize=(10, height * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, 2, squeeze=False)
    for (left, _), link in zip(grid, results.links, strict=True):
        left.set_title(title(results, link), loc="left", fontsize=9, fontweight="bold")
    return figure, grid


def _add_legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
