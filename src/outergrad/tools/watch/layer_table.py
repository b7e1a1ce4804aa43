"""The layers of a run as lines of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from outergrad._amounts import amount, seconds, short
from outergrad.tools.watch.chart import chart
from outergrad.tools.watch.summary import LayerLine
from outergrad.tools.watch.view import DIM

TRAVELS = {"factors": "cyan", "low rank": "magenta", "replayed": "blue", "dense": "bright_black"}
NOTHING = Text("-", DIM)
_NAME = 18
_WIDE = 100
_WIDER = 128


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: above it.
        width: columns of the terminal.
        cell: what it says of a layer in that width.
        from_width: shown in a terminal at least as wide.
        left: whether its text begins at the left.
        grows: whether it takes of what is left over, up to three times its width.
    """

    title: str
    width: int
    cell: Callable[[LayerLine, int], Text]
    from_width: int = 0
    left: bool = False
    grows: bool = False


def table(lines: Sequence[LayerLine], width: int) -> list[Text]:
    """The heading and a line for each layer."""
    columns = _grown([c for c in COLUMNS if width >= c.from_width], lines, width)
    names = width - sum(c.width + 2 for c in columns)
    heading = _row([Text("layer".ljust(names)), *(_padded(Text(c.title), c) for c in columns)])
    heading.stylize(DIM)
    return [heading, *(_layer(line, columns, names) for line in lines)]


def _grown(columns: list[Column], lines: Sequence[LayerLine], width: int) -> list[Column]:
    """Gives curves what names leave over."""
    longest = max((len(_name(line)) for line in lines), default=_NAME)
    spare = width - sum(c.width + 2 for c in columns) - max(longest, _NAME)
    each = max(0, spare) // max(1, sum(c.grows for c in columns))
    return [replace(c, width=min(3 * c.width, c.width + each)) if c.grows else c for c in columns]


def _layer(line: LayerLine, columns: Sequence[Column], names: int) -> Text:
    cells = (_padded(c.cell(line, c.width), c) for c in columns)
    return _row([Text(_shortened(_name(line), names).ljust(names)), *cells])


def _shortened(name: str, width: int) -> str:
    """Without the modules around it for which there is no room."""
    if len(name) <= width:
        return name
    end = name[1 - width :]
    _, dot, whole = end.partition(".")
    return "…" + (whole if dot and name[-width] != "." else end)


def _name(line: LayerLine) -> str:
    return line.last.layer.removesuffix(".weight")


def _row(cells: Sequence[Text]) -> Text:
    return Text("  ").join(cells)


def _padded(cell: Text, column: Column) -> Text:
    cell = cell.copy()
    cell.truncate(column.width)
    cell.align("left" if column.left else "right", column.width)
    return cell


def _travels(line: LayerLine, width: int) -> Text:
    return Text(line.last.travels, TRAVELS.get(line.last.travels, ""))


def _rows(line: LayerLine, width: int) -> Text:
    if not line.last.rows:
        return NOTHING
    rows, kept = line.last.rows, line.last.kept_rows
    shown = amount(rows, "").replace(" ", "") if rows >= 10_000 else str(rows)
    return Text.assemble((f"{shown}→", DIM), str(kept))


def _rank(line: LayerLine, width: int) -> Text:
    rank = line.last.effective_rank
    return NOTHING if rank is None else Text(short(rank))


def _rank_curve(line: LayerLine, width: int) -> Text:
    return Text(chart(line.effective_rank, width, least_span=0.25)[0], "cyan")


def _spectrum(line: LayerLine, width: int) -> Text:
    return Text(chart(line.last.singular_values or (), width, low=0.0)[0], "blue")


def _cosine(line: LayerLine, width: int) -> Text:
    return NOTHING if line.cosine is None else Text(f"{line.cosine:.2f}", agreeing(line.cosine))


def agreeing(cosine: float) -> str:
    """The colour of a cosine between a site's gradient and the mean one."""
    return "green" if cosine > 0.7 else "yellow" if cosine > 0.3 else "red"


def _error(line: LayerLine, width: int) -> Text:
    error = line.relative_error
    return (
        NOTHING if error is None else Text(f"{error:.2f}" if error else "0", "" if error else DIM)
    )


COLUMNS = (
    Column("travels", 8, _travels, left=True),
    Column("rows→kept", 9, _rows, from_width=72),
    Column("sent", 7, lambda line, _: Text(amount(line.sent_bytes))),
    Column("received", 8, lambda line, _: Text(amount(line.received_bytes)), from_width=_WIDER),
    Column("compress", 8, lambda line, _: _time(line.compress_s), from_width=_WIDER),
    Column("wait", 7, lambda line, _: _time(line.wait_s), from_width=_WIDE),
    Column("rank", 4, _rank),
    Column("", 7, _rank_curve, from_width=64, left=True, grows=True),
    Column("spectrum", 12, _spectrum, from_width=_WIDE, left=True, grows=True),
    Column("cosine", 6, _cosine, from_width=56),
    Column("error", 5, _error),
)


def _time(value: float) -> Text:
    return Text(seconds(value)) if value else NOTHING
