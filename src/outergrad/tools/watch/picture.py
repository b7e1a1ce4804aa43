"""A run as lines of a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from outergrad.tools.watch.curves import curve_height, hidden, scalar_lines
from outergrad.tools.watch.layer_table import table
from outergrad.tools.watch.overview import head, traffic
from outergrad.tools.watch.state import Watched
from outergrad.tools.watch.summary import layer_lines, scalars
from outergrad.tools.watch.view import DIM, View, fitted, rule, sides


def picture(watched: Watched, view: View) -> Text:
    """The whole of it, in at most the width and height of the view."""
    lines = _lines(watched, view) if watched.sites else [waiting(view)]
    return Text("\n").join(fitted(line, view.width) for line in lines[: view.height])


def _lines(watched: Watched, view: View) -> list[Text]:
    curves = scalars(watched)
    above, below = head(watched, view), [*traffic(watched, view), rule(view)]
    rows = table(layer_lines(watched), view.width - 2)
    foot = _foot(view, hidden(view, len(curves)))
    space = _space(view, above, below, foot)
    drawn = scalar_lines(curves, view, curve_height(view, space, len(rows), len(curves)))
    return [*above, *drawn, *below, *_cut(rows, space - len(drawn)), *foot]


def waiting(view: View) -> Text:
    """What is said while there is nothing."""
    return Text(f"waiting for site-*.jsonl in {view.path}", "yellow")


def _space(view: View, *parts: Sequence[Text]) -> int:
    """Lines left for curves and layers."""
    if view.height is None:
        return 10**6
    return max(2, view.height - sum(map(len, parts)))


def _cut(rows: list[Text], space: int) -> list[Text]:
    """The heading and as many layers as there is room for."""
    if len(rows) <= space:
        return rows
    kept = max(1, space - 1)
    return [*rows[:kept], Text(f"and {len(rows) - kept} more", DIM)]


def _foot(view: View, hidden_curves: int) -> list[Text]:
    foreign = f"{view.foreign:,} lines that are no events"
    left = Text("cosine, error: of the site that agrees least, drops most", DIM)
    if hidden_curves:
        left = Text(f"and {hidden_curves} more scalars", DIM)
    if view.foreign:
        left = Text("1 line that is no event" if view.foreign == 1 else foreign, "yellow")
    return [sides(left, Text("Ctrl-C to leave", DIM), view.width)]
