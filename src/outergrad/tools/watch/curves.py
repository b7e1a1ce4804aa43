"""The training loop's own figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.text import Text

from outergrad._amounts import plain
from outergrad.tools.watch.chart import chart
from outergrad.tools.watch.view import LABEL, View

_HIGHEST = 8
_TALL = 30
_NARROWEST = 40
_ROWS = 2


def scalar_lines(curves: Mapping[str, Sequence[float]], view: View, height: int) -> list[Text]:
    """Their last values, and curves beside each other."""
    shown = list(curves)[: _shown(len(curves), view)]
    across = _across(len(shown), view)
    each = (view.width - 2) // across
    label = max([LABEL, *(min(len(name) + 1, 2 * LABEL) for name in shown)])
    cells = [_cell(name[: label - 1].ljust(label), curves[name], each, height) for name in shown]
    grid = [cells[i : i + across] for i in range(0, len(cells), across)]
    return [Text.assemble(*row) for line in grid for row in zip(*line, strict=True)]


def curve_height(view: View, space: int, layers: int, curves: int) -> int:
    """Lines of a curve: a few in a high terminal, more where layers leave them."""
    if view.height is None or not curves:
        return 1
    lines = -(-_shown(curves, view) // _across(curves, view))
    least = 3 if view.height >= _TALL else 1
    return min(_HIGHEST, max(least, (space - layers) // lines))


def hidden(view: View, curves: int) -> int:
    """How many of them there is no room for."""
    return curves - _shown(curves, view)


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
