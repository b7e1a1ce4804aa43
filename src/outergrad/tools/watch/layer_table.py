"""Table of a run's layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from outergrad._amounts import amount, seconds, short
from outergrad.tools.watch.chart import chart
from outergrad.tools.watch.summary import LayerLine
from outergrad.tools.watch.view import DIM

TRAVELS = {
    "factors": "cyan",
    "low rank": "magenta",
    "sparse": "yellow",
    "compressed": "green",
    "replayed": "blue",
    "dense": "bright_black",
}
NOTHING = Text("-", DIM)
_NAME = 18
_WIDE = 100
_WIDER = 128

Cell = Callable[[LayerLine, int], Text]


@dataclass(frozen=True)
class Column:
    """Column of the table.

    Attributes:
        title: heading.
        width: columns of the terminal.
        cell: formats a layer's cell, given the width.
        from_width: minimum width of a terminal that shows it.
        left: True for left alignment.
        grows: True if it gets a share of spare columns, up to three times its width.
    """

    title: str
    width: int
    cell: Cell
    from_width: int = 0
    left: bool = False
    grows: bool = False


def table(lines: Sequence[LayerLine], width: int) -> list[Text]:
    """Returns the heading and a line for each layer."""
    columns = _grown([c for c in COLUMNS if width >= c.from_width], lines, width)
    names = width - sum(c.width + 2 for c in columns)
    heading = _row("layer".ljust(names), (Text(c.title) for c in columns), columns)
    heading.stylize(DIM)
    shown = [_shortened(_name(line), names).ljust(names) for line in lines]
    cells = [[c.cell(line, c.width) for c in columns] for line in lines]
    return [heading, *(_row(*row, columns) for row in zip(shown, cells, strict=True))]


def _grown(columns: list[Column], lines: Sequence[LayerLine], width: int) -> list[Column]:
    """Columns with those that grow widened by the space that names leave."""
    longest = max((len(_name(line)) for line in lines), default=_NAME)
    spare = width - sum(c.width + 2 for c in columns) - max(longest, _NAME)
    each = max(0, spare) // max(1, sum(c.grows for c in columns))
    return [replace(c, width=min(3 * c.width, c.width + each)) if c.grows else c for c in columns]


def _row(first: str, cells: Iterable[Text], columns: Sequence[Column]) -> Text:
    padded = (_padded(cell, c) for cell, c in zip(cells, columns, strict=True))
    return Text("  ").join([Text(first), *padded])


def _shortened(name: str, width: int) -> str:
    """Name without as many enclosing modules as do not fit."""
    if len(name) <= width:
        return name
    end = name[1 - width :]
    _, dot, whole = end.partition(".")
    return "…" + (whole if dot and name[-width] != "." else end)


def _name(line: LayerLine) -> str:
    return line.last.layer.removesuffix(".weight")


def _padded(cell: Text, column: Column) -> Text:
    cell = cell.copy()
    cell.truncate(column.width)
    cell.align("left" if column.left else "right", column.width)
    return cell


def _travels(line: LayerLine, width: int) -> Text:
    return Text(line.last.travels, TRAVELS.get(line.last.travels, ""))


def _rows(line: LayerLine, width: int) -> Text:
    rows, kept = line.last.rows, line.last.kept_rows
    if not rows:
        return NOTHING
    shown = amount(rows, "").replace(" ", "") if rows >= 10_000 else str(rows)
    return Text.assemble((f"{shown}→", DIM), str(kept))


def _rank(line: LayerLine, width: int) -> Text:
    rank = line.last.effective_rank
    return NOTHING if rank is None else Text(short(rank))


def _cosine(line: LayerLine, width: int) -> Text:
    return NOTHING if line.cosine is None else Text(f"{line.cosine:.2f}", agreeing(line.cosine))


def _duplicates(line: LayerLine, width: int) -> Text:
    return NOTHING if line.duplicates is None else Text(f"{line.duplicates:.0%}")


def agreeing(cosine: float) -> str:
    """Returns the colour of a cosine between a site's gradient and the mean gradient."""
    return "green" if cosine > 0.7 else "yellow" if cosine > 0.3 else "red"


def _error(line: LayerLine, width: int) -> Text:
    error = line.relative_error
    if error is None:
        return NOTHING
    return Text(f"{error:.2f}") if error else Text("0", DIM)


def _bytes(figure: str) -> Cell:
    return lambda line, _: Text(amount(line.mean(figure)))


def _time(figure: str) -> Cell:
    return lambda line, _: Text(seconds(s)) if (s := line.mean(figure)) else NOTHING


def _ranks(line: LayerLine, width: int) -> Text:
    return Text(chart(line.effective_rank, width, least_span=0.25)[0], "cyan")


def _spectrum(line: LayerLine, width: int) -> Text:
    return Text(chart(line.last.singular_values or (), width, low=0.0)[0], "blue")


COLUMNS = (
    Column("travels", 8, _travels, left=True),
    Column("rows→kept", 9, _rows, from_width=72),
    Column("sent", 7, _bytes("sent_bytes")),
    Column("received", 8, _bytes("received_bytes"), from_width=_WIDER),
    Column("compress", 8, _time("compress_s"), from_width=_WIDER),
    Column("wait", 7, _time("wait_s"), from_width=_WIDE),
    Column("rank", 4, _rank),
    Column("", 7, _ranks, from_width=64, left=True, grows=True),
    Column("spectrum", 12, _spectrum, from_width=_WIDE, left=True, grows=True),
    Column("cosine", 6, _cosine, from_width=56),
    Column("dup", 4, _duplicates, from_width=_WIDER),
    Column("error", 5, _error),
)
