"""Picture of a run, as lines of a terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from rich.text import Text

from outergrad._amounts import amount, duration, plain, seconds, short, times
from outergrad._printable import printable
from outergrad.core.run_figures import (
    LayerLine,
    Speed,
    Watched,
    WatchedSite,
    agreement,
    layer_lines,
    noise_batches,
    outliers,
    scalars,
    silence,
    speed,
)
from outergrad.events import Privacy

BLOCKS = "▁▂▃▄▅▆▇█"


def chart(
    values: Sequence[float],
    width: int,
    height: int = 1,
    *,
    low: float | None = None,
    least_span: float = 0.0,
) -> list[str]:
    """Draws a curve with block characters.

    Args:
        values: values, oldest first; averaged in bins if there are more than columns.
        width: columns.
        height: lines.
        low: value of an empty block; the smallest value unless given.
        least_span: minimum difference between the lowest and the highest block, as a share of the
            largest value, so that small changes look small.

    Returns:
        The lines, from the top, each `width` long.
    """
    means = _binned(values, width) if width > 0 else []
    finite = [v for v in means if math.isfinite(v)] or [0.0]
    bottom, top = min(finite) if low is None else low, max(finite)
    missing = max(0.0, least_span * abs(top) - (top - bottom))
    levels = [_level(v, bottom - missing / 2, top + missing / 2, 8 * height) for v in means]
    rows = [[_block(level - 8 * row) for level in levels] for row in reversed(range(height))]
    return ["".join(row).ljust(width) for row in rows]


def _level(value: float, bottom: float, top: float, levels: int) -> int:
    """Eighths of a block, from 1; 0 if the value is not finite."""
    if not math.isfinite(value):
        return 0
    share = (value - bottom) / (top - bottom) if top > bottom else 0.5
    return 1 + round((levels - 1) * min(1.0, max(0.0, share)))


def _block(level: int) -> str:
    return BLOCKS[min(level, 8) - 1] if level > 0 else " "


def _binned(values: Sequence[float], width: int) -> list[float]:
    count = len(values)
    if count <= width:
        return list(values)
    edges = [i * count // width for i in range(width + 1)]
    bins = (values[a:b] for a, b in pairwise(edges))
    return [sum(b) / len(b) for b in bins]


DIM = "bright_black"
LABEL = 9


@dataclass(frozen=True)
class View:
    """Size and time for which a picture is drawn.

    Attributes:
        path: folder of the run.
        foreign: number of lines in its files that are not events.
        now: seconds since 1970.
        width: columns of the picture.
        height: maximum number of lines; None for no limit.
    """

    path: Path
    foreign: int
    now: float
    width: int
    height: int | None


def labelled(label: str, text: Text) -> Text:
    """Returns a line that starts with its label."""
    return Text.assemble((label.ljust(LABEL), "dim"), text)


def dotted(*figures: str | tuple[str, str] | Text | None) -> Text:
    """Joins figures with dots; None and "" are left out."""
    dot = Text.assemble((" · ", DIM))
    return dot.join(Text.assemble(figure) for figure in figures if figure)


def rule(view: View) -> Text:
    """Returns a line between two parts of the picture."""
    return Text("─" * (view.width - 2), DIM)


def sides(left: Text, right: Text, width: int) -> Text:
    """Returns a line with text at both ends; the left one is cut if there is no room."""
    left = left.copy()
    left.truncate(max(0, width - 4 - len(right)), overflow="ellipsis", pad=True)
    return Text.assemble(left, "  ", right)


def fitted(line: Text, width: int) -> Text:
    """Returns a line with a left margin, and an ellipsis if it is cut.

    Names in it come from files, hence only printable characters reach the terminal.
    """
    fitted = Text.assemble(" ", line)
    fitted.plain = printable(fitted.plain)  # of the same length, so that colours stay
    fitted.truncate(width, overflow="ellipsis")
    return fitted


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


_BAR = 24
_DOTS = 16
_SIGNS = {
    "compress": ("█", "magenta"),
    "replay": ("▓", "blue"),
    "wait": ("▒", "yellow"),
    "the rest": ("░", DIM),
}


def head(watched: Watched, view: View) -> list[Text]:
    """Returns the lines with the run's name, method, state and progress."""
    state = _state(watched, view.now)
    method = watched.run.method if watched.run else "a run of which the beginning was not written"
    path, room = str(view.path), view.width - len(state[0]) - len(method) - 6
    title = Text.assemble((path if len(path) <= room else view.path.name, "bold"), "  ", method)
    lines = [sides(title, Text(*state), view.width), rule(view), _progress(watched)]
    told = [site.privacy for site in watched.sites if site.privacy is not None]
    return [*lines, _privacy(told[0])] if told else lines


def _privacy(told: Privacy) -> Text:
    epsilon = ", ".join(f"{v:.3g} ({observer})" for observer, v in told.epsilon.items())
    budget = "" if told.stop_at is None else f"stops at {told.stop_at:g}"
    known = (f"ε {epsilon}", budget, f"δ {told.delta:g}") if epsilon else (told.unknown,)
    return labelled("privacy", dotted(*known, f"{told.steps:,} released steps"))


def _state(watched: Watched, now: float) -> tuple[str, str]:
    ends = [site.ended for site in watched.sites if site.ended]
    if len(ends) == len(watched.sites):
        error = next((f" by {end.error}" for end in ends if end.error), "")
        ago = duration(now - max(site.heard for site in watched.sites))
        return f"■ ended{error} {ago} ago", "red" if error else "green"
    quiet = silence(watched, now)
    return ("● live", "green") if quiet is None else (f"○ no news for {duration(quiet)}", "yellow")


def _progress(watched: Watched) -> Text:
    run, step_s = watched.run, speed(watched).step_s
    figures = [f"{short(1 / step_s)} per second", seconds(step_s)] if step_s else []
    if run:
        since = f" since step {run.step:,}" if run.step else ""
        figures.append(duration(max(s.time for s in watched.sites) - run.time) + since)
        shared = amount(sum(map(math.prod, run.shapes.values())), "").strip()
        figures.append(f"{shared} parameters shared")
    step = max(site.step for site in watched.sites)
    return labelled("step", dotted((f"{step:,}", "bold"), *figures))


def traffic(watched: Watched, view: View) -> list[Text]:
    """Returns the lines about bytes, seconds and sites."""
    told = speed(watched)
    return [
        labelled("sent", _sent(told)),
        labelled("time", _times(told, view.width)),
        labelled("sites", _sites(watched, view)),
        *_noise(watched),
        *_outliers(watched),
        *_silent_ones(watched, view),
        *_trial(watched),
        *_mishaps(watched),
        *_change(watched),
        *_exchange(watched),
    ]


def _sent(told: Speed) -> Text:
    if told.sent_bytes is None or told.total_sent_bytes is None:
        return Text("nothing recorded yet", DIM)
    return dotted(
        Text.assemble((amount(told.sent_bytes), "bold"), " per step"),
        f"{amount(told.bytes_per_s)}/s" if told.bytes_per_s else None,
        f"{amount(told.total_sent_bytes)} in all",
        (f"{times(told.fewer)}\u00d7 fewer than DDP", "bold green") if told.fewer else None,
    )


def _times(told: Speed, width: int) -> Text:
    known = sum(told.parts_s.values())
    whole = max(told.step_s or 0.0, known)
    rest = {"the rest": max(0.0, whole - known)} if told.step_s else {}
    parts = [(name, s, *_SIGNS[name]) for name, s in {**told.parts_s, **rest}.items() if s]
    columns = _BAR if width >= 76 else 0
    bar = [(sign * round(columns * s / whole), colour) for _, s, sign, colour in parts]
    legend = [
        part
        for name, s, sign, colour in parts
        for part in ("  ", (sign, colour), f" {name} ", (_share(s, told.step_s and whole), "bold"))
    ]
    return Text.assemble(*bar, *legend[0 if bar and columns else 1 :])


def _share(part_s: float, whole_s: float | None) -> str:
    return f"{part_s / whole_s:.0%}" if whole_s else seconds(part_s)


def _sites(watched: Watched, view: View) -> Text:
    count = watched.run.sites if watched.run else len(watched.sites)
    there = {site.rank: site for site in watched.sites}
    dots = [_site_dot(there.get(rank), view.now) for rank in range(min(count, _DOTS))]
    parts = [Text(" ").join(dots), f"  {count}" if count > _DOTS else ""]
    if len(there) < count:
        parts += [f"  {len(there)} of {count} write here"]
    told = agreement(watched)
    if told and count > 1:
        parts += ["  agree ", (f"{told.least:.2f}", agreeing(told.least)), f" (site {told.site})"]
        parts += [" to ", (f"{told.most:.2f}", agreeing(told.most)), "  "]
        wide = max(0, min(40, view.width - 2 - LABEL - len(Text.assemble(*parts))))
        parts += [(chart(told.history, wide, least_span=0.05)[0], "green")]
    return Text.assemble(*parts)


def _site_dot(site: WatchedSite | None, now: float) -> Text:
    if site is None:
        return Text("·", DIM)
    if site.ended:
        return Text("■", "red" if site.ended.error else "green")
    return Text("●", "green") if site.silence_s(now) is None else Text("○", "yellow")


def _noise(watched: Watched) -> list[Text]:
    batches = noise_batches(watched)
    if batches is None:
        return []
    return [labelled("noise", Text(f"as much as signal in {times(batches)} batches of a site"))]


def _outliers(watched: Watched) -> list[Text]:
    found = outliers(watched)
    if not found:
        return []
    worst, others = found[0], len(found) - 1
    told = (
        f"{worst.times:.1f}\u00d7 the median, in {worst.layer}: {worst.sample} of site {worst.site}"
    )
    return [labelled("samples", dotted((told, "yellow"), f"{others} more" if others else None))]


def _trial(watched: Watched) -> list[Text]:
    trial = next((site.trial for site in watched.sites if site.trial), None)
    if trial is None:
        return []
    methods = " / ".join(dict.fromkeys(trial.methods))
    took = f"{seconds(trial.seconds)} against {seconds(trial.kept_seconds)}"
    return [labelled("trial", dotted(f"{methods}: {trial.outcome}", took, f"step {trial.step:,}"))]


def _mishaps(watched: Watched) -> list[Text]:
    """Line with failed steps, from the site that reports most of them."""
    mishaps = max((site.mishaps for site in watched.sites), key=len)
    if not mishaps:
        return []
    last, counts = mishaps[-1], Counter(mishap.what for mishap in mishaps)
    who = f"site {', '.join(map(str, last.sites))}" if last.sites else "a site"
    told = ", ".join(f"{count} {what}" for what, count in counts.items())
    about = f"; step {last.step:,} {last.what}: {who}" + f", {last.layer}" * bool(last.layer)
    return [labelled("mishaps", Text(told + about, "bold yellow"))]


def _change(watched: Watched) -> list[Text]:
    changes = [site.change for site in watched.sites if site.change is not None]
    if not changes:
        return []
    last = max(changes, key=lambda change: change.epoch)
    return [labelled("sites", Text(f"{', '.join(last.sites)} from step {last.step:,} on", "bold"))]


def _exchange(watched: Watched) -> list[Text]:
    """Line with who was late for the last exchange that went ahead with a quorum."""
    exchanges = [site.exchange for site in watched.sites if site.exchange is not None]
    last = max(exchanges, key=lambda exchange: (exchange.time, exchange.number), default=None)
    if last is None:
        return []
    late = f", without {', '.join(last.late)}, which was late" if last.late else ""
    told = f"{last.number:,}: {', '.join(last.took_part)}{late}"
    return [labelled("exchange", Text(told, "bold yellow" if late else "bold"))]


def _silent_ones(watched: Watched, view: View) -> list[Text]:
    """Line with sites that are silent while others are not, or that became silent first."""
    quiet = [s for s in watched.sites if s.silence_s(view.now) is not None]
    last = max(site.step for site in watched.sites)
    if len(quiet) == sum(site.ended is None for site in watched.sites):
        quiet = [site for site in quiet if site.step < last]
    if not quiet:
        return []
    told = [f"{s.rank} for {duration(view.now - s.heard)}, at step {s.step:,}" for s in quiet]
    return [labelled("", Text("silent: site " + "; site ".join(told), "bold yellow"))]


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
