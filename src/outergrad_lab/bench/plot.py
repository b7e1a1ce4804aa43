"""Results as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no screen is needed
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from outergrad._whole_files import whole_file
from outergrad_lab.bench.plan import COMPARED
from outergrad_lab.bench.results import LinkResult, Results, Timing
from outergrad_lab.bench.table import title

Style = dict[str, Any]
LOOKS: dict[str, Style] = {
    "alone": {"color": "darkgrey", "marker": "."},
    "ddp": {"color": "black", "marker": "o", "linewidth": 3},
    "ddp-fp16": {"color": "black", "marker": "s", "linestyle": "--"},
    "dense": {"color": "tab:green", "marker": "x", "linestyle": ":"},
    "dad": {"color": "tab:orange", "marker": "o", "linewidth": 3},
    "dad-activations": {"color": "gold", "marker": "x", "linestyle": ":"},
}
"""Of what often lies on another line, both can be seen."""
FAMILIES = {
    "powersgd": [{"color": c, "marker": "v"} for c in ("#9ecae1", "#6baed6", "#3182bd", "#08519c")],
    "rank-dad": [{"color": c, "marker": "^"} for c in ("#fcae91", "#fb6a4a", "#de2d26", "#a50f15")],
    "": [{"color": c} for c in ("tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")],
}
"""Methods that differ in a number, from light to dark; the last is for all others."""


def plot(results: Results, path: Path) -> None:
    """Draws seconds and bytes, one line or bar per method, into a PNG file."""
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = _figure(results)
        try:
            with whole_file(path) as file:
                figure.savefig(file, format="png", dpi=150, bbox_inches="tight")
        finally:
            plt.close(figure)


def styles(methods: Iterable[str]) -> dict[str, Style]:
    """How each method is drawn, in every plot alike: peers grey and blue, ours in warm colours."""
    looks = {family: cycle(members) for family, members in FAMILIES.items()}
    wanted = list(methods)
    names = dict.fromkeys([*COMPARED, *wanted])
    every = {m: LOOKS.get(m) or next(looks[_family(m)]) for m in names}
    return {method: every[method] for method in wanted}


def _family(method: str) -> str:
    return next(family for family in FAMILIES if method.startswith(family))


def _figure(results: Results) -> Figure:
    if results.links[0].arrivals:
        return _ways(results)
    return _lines(results) if len(results.links) > 1 else _bars(results)


def _lines(results: Results) -> Figure:
    """Seconds and bytes against the rate of the link, from the slowest to the unshaped."""
    links = sorted(results.links, key=lambda link: link.rate_bit_per_s or math.inf)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    methods = [timing.method for timing in links[0].timings]
    _against_rate(left, links, methods, lambda timing: timing.median_s)
    senders = [method for method in methods if method != "alone"]
    _against_rate(right, links, senders, lambda timing: timing.sent_bytes)
    left.set(title="Time of a step")
    right.set(title="Sent per step and site")
    _readable(left.yaxis, "s")
    _readable(right.yaxis, "B")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", frameon=False)
    plan = results.plan
    figure.suptitle(f"{plan['workload']}, {plan['sites']} sites", fontweight="bold")
    return figure


def _against_rate(
    axes: Axes, links: list[LinkResult], methods: list[str], value: Callable[[Timing], float]
) -> None:
    style = styles(methods)
    for method in methods:
        timings = [timing for link in links for timing in link.timings if timing.method == method]
        axes.plot(range(len(links)), [value(t) for t in timings], label=method, **style[method])
    axes.set(yscale="log", xlabel="link")
    axes.set_xticks(range(len(links)), [_name(link) for link in links])
    axes.grid(alpha=0.3)


def _name(link: LinkResult) -> str:
    return "unshaped" if link.link == "none" else link.link


def _bars(results: Results) -> Figure:
    """Seconds and bytes of every method, link by link."""
    height = 0.8 + 0.25 * len(results.links[0].timings)
    figure, grid = _grid(results, height)
    for (left, right), link in zip(grid, results.links, strict=True):
        names = [timing.method for timing in link.timings]
        colours = [styles(names)[name]["color"] for name in names]
        left.barh(names, [1e3 * timing.median_s for timing in link.timings], color=colours)
        right.barh(names, [timing.sent_bytes / 1e6 for timing in link.timings], color=colours)
        left.set(xlabel="ms per step")
        right.set(xlabel="MB sent per step and site")
        left.set_title(title(results, link), loc="left", fontsize=9, fontweight="bold")
        for axes in (left, right):
            axes.invert_yaxis()
    return figure


def _ways(results: Results) -> Figure:
    """Test loss against seconds and against bytes, link by link."""
    figure, grid = _grid(results, 3.6)
    for (left, right), link in zip(grid, results.links, strict=True):
        looks = styles(arrival.method for arrival in link.arrivals)
        style = {method: look | {"marker": ""} for method, look in looks.items()}
        for one in link.arrivals:
            loss = [mark.loss for mark in one.way]
            left.plot(
                [mark.seconds for mark in one.way], loss, label=one.method, **style[one.method]
            )
            if one.method != "alone":
                right.plot([mark.sent_bytes for mark in one.way], loss, **style[one.method])
        left.set(xlabel="time in steps", ylabel="test loss", xscale="log")
        right.set(xlabel="sent by a site", xscale="log")
        left.set_title(title(results, link), loc="left", fontsize=9, fontweight="bold")
        _readable(left.xaxis, "s")
        _readable(right.xaxis, "B")
        for axes in (left, right):
            axes.axhline(results.plan["until_loss"], color="lightgrey", linestyle=":")
    figure.legend(
        *grid[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False
    )
    return figure


def _grid(results: Results, height: float) -> tuple[Figure, Any]:
    rows = len(results.links)
    size = (10, height * rows + 0.4)
    return plt.subplots(rows, 2, figsize=size, squeeze=False, layout="constrained")


def _readable(axis: Axis, unit: str) -> None:
    """Writes a logarithmic axis as 20 ms, 5 MB and the like."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axis.set_major_formatter(EngFormatter(unit))
    axis.set_minor_formatter(NullFormatter())
