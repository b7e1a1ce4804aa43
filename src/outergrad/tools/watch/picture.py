"""Picture of a run, as lines of a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.text import Text

from outergrad._amounts import plain
from outergrad.tools.watch.chart import chart
from outergrad.tools.watch.layer_table import table
from outergrad.tools.watch.overview import head, traffic
from outergrad.tools.watch.state import Watched
from outergrad.tools.watch.summary import layer_lines, scalars
from outergrad.tools.watch.view import DIM, LABEL, View, fitted, rule, sides

_HIGHEST = 8
_TALL = 30
_NARROWEST = 40
_ROWS = 2


def picture(watched: Watched, view: View) -> Text:
    """Returns the whole picture, within the width and height of the view."""
    lines = _lines(watched, view) if watched.sites else [waiting(view)]
    return Text("\n").join(fitted(line, view.width) for line in lines[: view.height])


def _lines(watched: Watched, view: View) -> list[Text]:
    curves = scalars(watched)
    above, below = head(watched, view), [*traffic(watched, view), rule(view)]
    rows = table(layer_lines(watched), view.width - 2)
    foot = _foot(view, len(curves) - _shown(len(curves), view))
    space = _space(view, above, below, foot)
    drawn = _scalar_lines(curves, view, _curve_height(view, space, len(rows), len(curves)))
    return [*above, *drawn, *below, *_cut(rows, space - len(drawn)), *foot]


def waiting(view: View) -> Text:
    """Returns the message while no file exists."""
    return Text(f"waiting for site-*.jsonl in {view.path}", "yellow")


def _space(view: View, *parts: Sequence[Text]) -> int:
    if view.height is None:
        return 10**6
    return max(2, view.height - sum(map(len, parts)))


def _cut(rows: list[Text], space: int) -> list[Text]:
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


def _scalar_lines(curves: Mapping[str, Sequence[float]], view: View, height: int) -> list[Text]:
    shown = list(curves)[: _shown(len(curves), view)]
    across = _across(len(shown), view)
    each = (view.width - 2) // across
    label = max([LABEL, *(min(len(name) + 1, 2 * LABEL) for name in shown)])
    cells = [_cell(name[: label - 1].ljust(label), curves[name], each, height) for name in shown]
    grid = [cells[i : i + across] for i in range(0, len(cells), across)]
    return [Text.assemble(*row) for line in grid for row in zip(*line, strict=True)]


def _curve_height(view: View, space: int, layers: int, curves: int) -> int:
    """Lines of a curve: at least a few in a tall terminal, more where layers leave room."""
    if view.height is None or not curves:
        return 1
    lines = -(-_shown(curves, view) // _across(curves, view))
    least = 3 if view.height >= _TALL else 1
    return min(_HIGHEST, max(least, (space - layers) // lines))


def _across(curves: int, view: View) -> int:
    return max(1, min(curves, view.width // _NARROWEST))


def _shown(curves: int, view: View) -> int:
    return curves if view.height is None else min(curves, _ROWS * _across(curves, view))


def _cell(label: str, values: Sequence[float], width: int, height: int) -> list[Text]:
    value = values[-1]
    number = (plain(value).ljust(8), "bold" if math.isfinite(value) else "bold red")
    first = Text.assemble((label, "dim"), number, " ")
    below = Text(" " * len(first))
    rows = chart(values, max(0, width - len(first) - 2), height)
    return [
        Text.assemble(below if i else first, (row, "green"), "  ") for i, row in enumerate(rows)
    ]
