"""A run as lines of a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from outergrad.watch.layer_table import DIM, agreeing, table
from outergrad.watch.state import Site, Watched
from outergrad.watch.summary import Speed, agreement, layer_lines, scalars, speed
from outergrad.watch.words import amount, chart, duration, seconds, short

_LABEL = 9
_BAR = 24
_CURVES = 8
_TALL = 30
_DOTS = 16


@dataclass(frozen=True)
class View:
    """From where a run is looked at.

    Attributes:
        path: the folder of the run.
        foreign: lines in its files that are no events.
        now: seconds since 1970.
        width: columns of the picture.
        height: lines that it may have; None for as many as there are.
    """

    path: Path
    foreign: int
    now: float
    width: int
    height: int | None


def picture(watched: Watched, view: View) -> Text:
    """The whole of it, in at most the view's height and exactly its width."""
    if not watched.sites:
        lines = [waiting(view)]
    else:
        above = _head(watched, view)
        curves = scalars(watched)
        below = [*_traffic(watched, view), _rule(view)]
        foot = _foot(view)
        rows = table(layer_lines(watched), view.width - 2)
        space = _space(view, above, below, foot)
        drawn = _scalars(curves, view, _curve_height(view, space, len(rows), len(curves)))
        rows = _cut(rows, space - len(drawn))
        lines = [*above, *drawn, *below, *rows, *foot]
    return Text("\n").join(_fitted(line, view.width) for line in lines[: view.height])


def waiting(view: View) -> Text:
    """What is said while there is nothing."""
    return Text(f"waiting for site-*.jsonl in {view.path}", "yellow")


def silence(watched: Watched, now: float) -> float | None:
    """Seconds since any site was heard, if all are silent."""
    silences = [site.silence_s(now) for site in watched.sites]
    known = [s for s in silences if s is not None]
    return min(known) if known and len(known) == len(silences) else None


def _space(view: View, *parts: Sequence[Text]) -> int:
    """Lines left for curves and layers."""
    if view.height is None:
        return 10**6
    return max(2, view.height - sum(map(len, parts)))


def _head(watched: Watched, view: View) -> list[Text]:
    quiet = silence(watched, view.now)
    state = ("● live", "green") if quiet is None else (f"○ no news for {duration(quiet)}", "yellow")
    method = watched.run.method if watched.run else "a run of which the beginning was not written"
    path, room = str(view.path), view.width - len(state[0]) - len(method) - 6
    title = Text.assemble((path if len(path) <= room else view.path.name, "bold"), "  ", method)
    return [_sides(title, Text(*state), view.width), _rule(view), _progress(watched)]


def _progress(watched: Watched) -> Text:
    run, told = watched.run, speed(watched)
    step = max(site.step for site in watched.sites)
    parts = [(f"{step:,}", "bold")]
    if told.step_s:
        parts += [_dot(), f"{short(1 / told.step_s)} per second", _dot(), seconds(told.step_s)]
    if run:
        since = f" since step {run.step:,}" if run.step else ""
        parts += [_dot(), duration(max(s.time for s in watched.sites) - run.time) + since]
        parts += [_dot(), amount(sum(map(math.prod, run.shapes.values())), "").strip()]
        parts += [" parameters shared"]
    return _labelled("step", Text.assemble(*parts))


def _traffic(watched: Watched, view: View) -> list[Text]:
    told = speed(watched)
    lines = [_labelled("sent", _sent(told)), _labelled("time", _times(told, view.width))]
    return [*lines, _labelled("sites", _sites(watched, view)), *_silent_ones(watched, view)]


def _sent(told: Speed) -> Text:
    if told.sent_bytes is None or told.total_sent_bytes is None:
        return Text("nothing recorded yet", DIM)
    parts = [(amount(told.sent_bytes), "bold"), " per step"]
    if told.bytes_per_s:
        parts += [_dot(), f"{amount(told.bytes_per_s)}/s"]
    parts += [_dot(), f"{amount(told.total_sent_bytes)} in all"]
    if told.fewer:
        parts += [_dot(), (f"{short(told.fewer, 2)}\u00d7 fewer than DDP", "bold green")]
    return Text.assemble(*parts)


def _times(told: Speed, width: int) -> Text:
    """A bar of a step's seconds, and what its parts are."""
    parts = {
        "compress": (told.compress_s, "█", "magenta"),
        "replay": (told.replay_s, "▓", "blue"),
        "wait": (told.wait_s, "▒", "yellow"),
    }
    known = sum(s for s, _, _ in parts.values())
    whole = max(told.step_s or 0.0, known)
    if told.step_s:
        parts["the rest"] = (max(0.0, whole - known), "░", DIM)
    columns = _BAR if width >= 76 else 0
    bar = [(sign * round(columns * s / whole), c) for s, sign, c in parts.values()] if whole else []
    legend = [
        part
        for name, (s, sign, colour) in parts.items()
        if s
        for part in ("  ", (sign, colour), f" {name} ", (_share(s, told.step_s), "bold"))
    ]
    return Text.assemble(*bar, *legend[0 if bar and columns else 1 :])


def _share(part_s: float, step_s: float | None) -> str:
    return f"{part_s / step_s:.0%}" if step_s else seconds(part_s)


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
        used = _LABEL + sum(len(p) if isinstance(p, str | Text) else len(p[0]) for p in parts)
        wide = max(0, min(40, view.width - 2 - used))
        parts += [(chart(told.history, wide, least_span=0.05)[0], "green")]
    return Text.assemble(*parts)


def _site_dot(site: Site | None, now: float) -> Text:
    if site is None:
        return Text("·", DIM)
    return Text("●", "green") if site.silence_s(now) is None else Text("○", "yellow")


def _silent_ones(watched: Watched, view: View) -> list[Text]:
    """Names the sites that are silent while others are not, or were so first."""
    quiet = [s for s in watched.sites if s.silence_s(view.now) is not None]
    last = max(site.step for site in watched.sites)
    if len(quiet) == len(watched.sites):
        quiet = [site for site in quiet if site.step < last]
    if not quiet:
        return []
    told = [f"{s.rank} for {duration(view.now - s.heard)}, at step {s.step:,}" for s in quiet]
    return [_labelled("", Text("silent: site " + "; site ".join(told), "bold yellow"))]


def _scalars(curves: dict[str, list[float]], view: View, height: int) -> list[Text]:
    """The training loop's own figures, with their curves beside each other."""
    across = max(1, min(len(curves), view.width // 40))
    each = (view.width - 2) // across
    most = across * (2 if view.height is not None else len(curves))
    cells = [_scalar(name, values, each, height) for name, values in [*curves.items()][:most]]
    grid = [cells[i : i + across] for i in range(0, len(cells), across)]
    return [Text.assemble(*row) for line in grid for row in zip(*line, strict=True)]


def _scalar(name: str, values: Sequence[float], width: int, height: int) -> list[Text]:
    label = Text(name[: 2 * _LABEL - 1].ljust(_LABEL), "dim")
    value = values[-1]
    number = Text(_plain(value).ljust(8), "bold" if math.isfinite(value) else "bold red")
    first = Text.assemble(label, number)
    free = max(0, width - len(first) - 3)
    rows = [Text(row, "green") for row in chart(values, free, height)]
    starts = [first, *(Text(" " * len(first)) for _ in rows[1:])]
    return [Text.assemble(a, " ", b, "  ") for a, b in zip(starts, rows, strict=True)]


def _plain(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else short(value, 4)


def _curve_height(view: View, space: int, layers: int, curves: int) -> int:
    """Lines of a curve: a few in a high terminal, more where layers leave them."""
    if view.height is None or not curves:
        return 1
    lines = min(2, -(-curves // max(1, view.width // 40)))
    least = 3 if view.height >= _TALL else 1
    return min(_CURVES, max(least, (space - layers) // lines))


def _cut(rows: list[Text], space: int) -> list[Text]:
    """The heading and as many layers as there is room for."""
    if len(rows) <= space:
        return rows
    kept = max(1, space - 1)
    return [*rows[:kept], Text(f"and {len(rows) - kept} more", DIM)]


def _foot(view: View) -> list[Text]:
    many = f"{view.foreign:,} lines that are no events"
    what = "1 line that is no event" if view.foreign == 1 else many
    note = "cosine, error: of the site that agrees least, drops most"
    left = Text(what, "yellow") if view.foreign else Text(note, DIM)
    return [_sides(left, Text("Ctrl-C to leave", DIM), view.width)]


def _labelled(label: str, text: Text) -> Text:
    return Text.assemble((label.ljust(_LABEL), "dim"), text)


def _dot() -> tuple[str, str]:
    return (" · ", DIM)


def _rule(view: View) -> Text:
    return Text("─" * (view.width - 2), DIM)


def _sides(left: Text, right: Text, width: int) -> Text:
    left = left.copy()
    left.truncate(max(0, width - 4 - len(right)), overflow="ellipsis", pad=True)
    return Text.assemble(left, "  ", right)


def _fitted(line: Text, width: int) -> Text:
    fitted = Text.assemble(" ", line)
    fitted.truncate(width, overflow="ellipsis")
    return fitted
