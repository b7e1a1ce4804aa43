"""HTML page about one or more runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from outergrad._amounts import amount, many, plain, seconds, times
from outergrad._version import __version__
from outergrad._whole_files import write_whole
from outergrad.core.packages import require
from outergrad.report.recording import Recording, UnreadableRunError, load_thinned
from outergrad.report.series import POINTS, series
from outergrad.report.sites import site_names, site_section
from outergrad.report.summary import Summary, columns_of, outliers, released, summary, trials


def whole_page(
    *,
    command: str,
    title: str,
    lead: str,
    head: str,
    body: str,
    about: str = "",
    style: str = "",
    scripts: Sequence[str] = (),
    reload_s: int | None = None,
) -> str:
    """Returns a page in one file.

    Args:
        command: command that made it.
        title: text of the heading.
        lead: text below the heading.
        head: HTML between the lead and the body.
        body: HTML.
        about: text behind the command.
        style: CSS in addition to the common style.
        scripts: elements at the end; without any, the page forbids scripts.
        reload_s: seconds after which a browser reloads it; None for never.
    """
    script, pictures = ("script-src 'unsafe-inline'; ", "data: blob:") if scripts else ("", "data:")
    return Template(asset("skeleton.html")).substitute(
        reload="" if reload_s is None else f'\n<meta http-equiv="refresh" content="{reload_s}">',
        allowed=f"{script}style-src 'unsafe-inline'; img-src {pictures}",
        command=escape(command),
        title=escape(title),
        about=escape(about),
        lead=escape(lead),
        head=head,
        body=body.rstrip("\n"),
        style=asset("style.css") + style,
        scripts="".join(f"\n{script}" for script in scripts),
        version=escape(__version__),
    )


def asset(name: str, package: str = "outergrad.report") -> str:
    """Returns the text of a file in a package's folder."""
    return files(package).joinpath(name).read_text("utf-8")


_SCRIPTS = (
    "theme.js",
    "parts.js",
    "figures.js",
    "panels.js",
    "sites.js",
    "layers.js",
    "page.js",
)
_SENT, _TIME, _NOISE = "Sent per step", "Time per step", "Noise scale"
_NOTHING, _TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, kw_only=True)
class Page:
    """Result of `write_page`.

    Attributes:
        path: path of the page.
        size_bytes: size of the file.
        problems: lines of text about what was wrong with the runs.
        ended: True if all its runs have ended.
    """

    path: Path
    size_bytes: int
    problems: tuple[str, ...]
    ended: bool


def write_page(
    runs: Sequence[str | Path], path: str | Path, *, reload_s: int | None = None
) -> Page:
    """Writes a self-contained page about one or more runs.

    Args:
        runs: folders of the runs, or files of single sites.
        path: path of the page.
        reload_s: seconds after which a browser reloads the page, while a run goes on; None for
            never.

    Raises:
        ImportError: pandas or plotly is missing.
        UnreadableRunError: none of the runs has anything that can be shown.
        OSError: the page cannot be written; an existing one stays.
    """
    require("pandas", "plotly")
    recordings, problems = _load_all(list(dict.fromkeys(map(Path, runs))))
    path = Path(path)
    ended = all(recording.ended for recording in recordings.values())
    content = _page(recordings, problems, None if ended else reload_s).encode()
    write_whole(path, content)
    return Page(path=path, size_bytes=len(content), problems=tuple(problems), ended=ended)


def _load_all(runs: Sequence[Path]) -> tuple[dict[str, Recording], list[str]]:
    found: dict[str, Recording] = {}
    problems: list[str] = []
    for name, run in zip(names(runs), runs, strict=True):
        try:
            found[name] = load_thinned(run, POINTS)
        except UnreadableRunError as error:
            problems.append(str(error))
        else:
            problems += [f"{name}: {problem}" for problem in found[name].problems]
    if not found:
        raise UnreadableRunError("; ".join(problems))
    return found, problems


def names(runs: Sequence[Path]) -> list[str]:
    """Returns names of runs: the last parts of their paths, as many as distinguish them.

    The name of a single site's file includes its folder.
    """
    parts = [_parts(path.resolve()) for path in runs]
    for depth in range(1, max(map(len, parts))):
        found = ["/".join(part[-depth:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return list(map(str, runs))


def _parts(path: Path) -> tuple[str, ...]:
    if path.suffix != ".jsonl":
        return path.parts
    return (*path.parts[:-2], "/".join(path.with_suffix("").parts[-2:]))


def _page(
    recordings: dict[str, Recording], problems: Sequence[str], reload_s: int | None = None
) -> str:
    from plotly.offline import get_plotlyjs

    found = [{"name": name, **series(recording)} for name, recording in recordings.items()]
    data = json.dumps(found, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    summaries = {name: summary(recording) for name, recording in recordings.items()}
    tried, odd = "What og.Auto() tried", "Samples that stood out most"
    notes = _listed(tried, recordings, trials) + _listed(odd, recordings, outliers)
    notes = _listed("What was released, by the ledger of privacy", recordings, released) + notes
    notes += _problems(problems)
    return whole_page(
        command="outergrad report",
        title=next(iter(recordings)) if len(recordings) == 1 else f"{len(recordings)} runs",
        lead=f"{_days(recordings)}." + (f" Follows every {reload_s} s." if reload_s else ""),
        head=f"{_verdict(summaries)}"
        f'<table class="figures summary">{_table(summaries)}</table>\n'
        f"{settings(recordings)}{notes}",
        reload_s=reload_s,
        body=asset("page.html").replace("<!-- sites -->", site_section(recordings)),
        scripts=(
            f'<script type="application/json" id="data">{data}</script>',
            f"<script>{get_plotlyjs()}</script>",
            "\n".join(["<script>", *map(asset, _SCRIPTS), "</script>"]),
        ),
    )


def _days(recordings: dict[str, Recording]) -> str:
    begun = [time for recording in recordings.values() for time in recording.runs["time"]]
    days = sorted(datetime.fromtimestamp(t).date().isoformat() for t in begun if 0 <= t < 1e11)
    if not days:
        return "Recorded by outergrad"
    return f"Recorded on {days[0]}" if days[0] == days[-1] else f"Recorded {days[0]} to {days[-1]}"


def _verdict(summaries: dict[str, Summary]) -> str:
    """Sentence about the run, or about the run that saves most."""
    told = {name: found for name, found in summaries.items() if found.verdict}
    if not told:
        return ""
    name = max(told, key=lambda name: (told[name].dense_bytes or 0) / (told[name].sent_bytes or 1))
    said = told[name].verdict
    sentence = f"{said[0].upper()}{said[1:]}." if len(summaries) == 1 else f"{name}: {said}."
    return f"<p class=verdict>{escape(sentence)}</p>\n"


def _table(summaries: dict[str, Summary]) -> str:
    scalars = columns_of(summaries.values())
    cells = {name: _cells(found, scalars) for name, found in summaries.items()}
    if all(found.noise_batches is None for found in summaries.values()):
        cells = {name: {h: c for h, c in row.items() if h != _NOISE} for name, row in cells.items()}
    heads = ["Run", *next(iter(cells.values()))]
    head = "".join(f"<th scope=col>{escape(text)}</th>" for text in heads)
    bars = _bars(summaries)
    rows = [
        _row(run, name, found.method, cells[name], bars[name], several=len(summaries) > 1)
        for run, (name, found) in enumerate(summaries.items())
    ]
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"


def _cells(found: Summary, scalars: Sequence[str]) -> dict[str, str]:
    return {
        "Sites": str(found.sites),
        "Steps": str(found.steps),
        _SENT: _told(found.sent_bytes, amount),
        "Fewer bytes than DDP": _saving(found),
        _TIME: _told(found.step_s, seconds),
        _NOISE: _told(found.noise_batches, lambda scale: f"{times(scale)} batches"),
        **{f"Final {name}": _told(found.finals.get(name), plain) for name in scalars},
    }


def _told(value: float | None, form: Callable[[float], str]) -> str:
    return _NOTHING if value is None else form(value)


def _saving(found: Summary) -> str:
    """Ratio of DDP's bytes to the run's, as ``19×``."""
    if not found.sent_bytes or not found.dense_bytes:
        return _NOTHING
    ratio = found.dense_bytes / found.sent_bytes
    return f"{times(ratio)}{_TIMES}" if ratio >= 0.995 else f"{times(1 / ratio)}{_TIMES} more"


def _bars(summaries: dict[str, Summary]) -> dict[str, dict[str, str]]:
    """Bars by run and heading; full width is the largest value, for bytes including DDP's."""
    found: dict[str, dict[str, str]] = {name: {} for name in summaries}
    for heading, values, most in (
        (_SENT, {n: s.sent_bytes for n, s in summaries.items()}, _most_bytes(summaries)),
        (_TIME, {n: s.step_s for n, s in summaries.items()}, 0.0),
    ):
        most = max([most, *(value or 0 for value in values.values())])
        for name, value in values.items():
            if value and most:
                share = f"<i style=width:{max(1, round(100 * value / most))}%></i>"
                found[name][heading] = f"<span class=bar>{share}</span>"
    return found


def _most_bytes(summaries: dict[str, Summary]) -> float:
    return float(max((found.dense_bytes or 0 for found in summaries.values()), default=0))


def _row(
    run: int,
    name: str,
    method: str,
    cells: Mapping[str, str],
    bars: Mapping[str, str],
    *,
    several: bool,
) -> str:
    """Table row; each cell names its column, which narrow screens show beside it."""
    others = [
        f'<td data-head="{escape(h)}">{escape(text)}{bars.get(h, "")}</td>'
        for h, text in cells.items()
    ]
    method = f"<span class=method>{escape(method or 'method not known')}</span>"
    mark = "<span class=swatch></span>" if several else ""
    head = f"<th scope=row>{mark}{escape(name)}{method}</th>"
    return f"<tr data-run={run}>{head}{''.join(others)}</tr>"


def _listed(
    heading: str, recordings: dict[str, Recording], told: Callable[[Recording], list[str]]
) -> str:
    lines = [
        f"<li>{escape(f'{name}: {line}' if len(recordings) > 1 else line)}</li>"
        for name, recording in recordings.items()
        for line in told(recording)
    ]
    if not lines:
        return ""
    items = "".join(lines)
    return (
        f"<details class=trials><summary>{heading} ({len(lines)})</summary>"
        f"<ul>{items}</ul></details>"
    )


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    lines = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    count = f"What was wrong with the files ({len(problems)})"
    opened = " open" if len(problems) <= 6 else ""
    return f"<details class=problems{opened}><summary>{count}</summary><ul>{lines}</ul></details>"


def settings(recordings: Mapping[str, Recording]) -> str:
    """Returns a collapsible panel with a list per run; empty if no run recorded its start."""
    lists = [_list(name, recording) for name, recording in recordings.items()]
    if not any(lists):
        return ""
    head = "<summary>Settings and machines</summary>"
    return f"<details class=settings>{head}{''.join(lists)}</details>\n"


def _list(name: str, recording: Recording) -> str:
    rows = "".join(
        f"<dt>{escape(what)}</dt><dd>{escape(value)}</dd>" for what, value in _lines(recording)
    )
    return f"<h3>{escape(name)}</h3><dl>{rows}</dl>" if rows else ""


def _lines(recording: Recording) -> Iterator[tuple[str, str]]:
    if recording.runs.empty:
        return
    last = recording.runs.iloc[-1]
    shapes = dict(last["shapes"]).values()
    yield "Method", str(last["method"]) or "not known"
    yield "Sites", str(last["sites"])
    yield "Shared", f"{many(len(shapes), 'tensor')}, {sum(map(math.prod, shapes)):,} numbers"
    yield "DDP would send", f"{amount(int(last['dense_bytes']))} per step and site"
    yield "Versions", f"outergrad {last['outergrad']}, torch {last['torch']}"
    machines = recording.runs.dropna(subset="machine").drop_duplicates("site", keep="last")
    for site, machine in zip(machines["site"], machines["machine"], strict=True):
        if machine:
            yield site_names(recording)[int(site)], str(machine)
