"""The page: its text, data, style and scripts in one file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from outergrad._amounts import amount, plain, seconds, times
from outergrad._version import __version__
from outergrad._whole_files import write_whole
from outergrad.report._load import Recording, UnreadableRunError, load_thinned, require
from outergrad.report._series import POINTS, series
from outergrad.report._summary import Summary, columns_of, summary

_SCRIPTS = ("theme.js", "parts.js", "figures.js", "layers.js", "page.js")
_NOTHING, _TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, kw_only=True)
class Page:
    """What was written.

    Attributes:
        path: where.
        size_bytes: of the file.
        problems: what was wrong with the runs, a line of text each.
    """

    path: Path
    size_bytes: int
    problems: tuple[str, ...]


def write_page(runs: Sequence[str | Path], path: str | Path) -> Page:
    """Writes one page about some runs, which needs nothing else to be opened.

    Args:
        runs: their folders, or files of single sites.
        path: of the page.

    Raises:
        ImportError: pandas or plotly is missing.
        UnreadableRunError: nothing of any of the runs can be shown.
        OSError: the page cannot be written; one that was there before stays.
    """
    require("pandas", "plotly")
    recordings, problems = _load_all(list(dict.fromkeys(map(Path, runs))))
    path = Path(path)
    content = _page(recordings, problems).encode()
    write_whole(path, content)
    return Page(path=path, size_bytes=len(content), problems=tuple(problems))


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
    """Names of runs: the last parts of their paths, as many as tell them apart."""
    parts = [_without_ending(path.resolve()).parts for path in runs]
    for depth in range(1, max(map(len, parts))):
        found = ["/".join(part[-depth:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return list(map(str, runs))


def _without_ending(path: Path) -> Path:
    return path.with_suffix("") if path.suffix == ".jsonl" else path


def _page(recordings: dict[str, Recording], problems: Sequence[str]) -> str:
    from plotly.offline import get_plotlyjs

    summaries = {name: summary(recording) for name, recording in recordings.items()}
    data = [{"name": name, **series(recording)} for name, recording in recordings.items()]
    return Template(_text("page.html")).substitute(
        title=escape(_title(list(recordings))),
        lead=escape(_lead(recordings)),
        summary=_table(summaries),
        problems=_problems(problems),
        version=escape(__version__),
        style=_text("style.css"),
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        plotly=get_plotlyjs(),
        script="\n".join(map(_text, _SCRIPTS)),
    )


def _text(name: str) -> str:
    return files("outergrad.report").joinpath(name).read_text("utf-8")


def _title(found: Sequence[str]) -> str:
    return found[0] if len(found) == 1 else f"{len(found)} runs"


def _lead(recordings: dict[str, Recording]) -> str:
    """When it was recorded."""
    times = [time for recording in recordings.values() for time in recording.runs["time"]]
    days = sorted(datetime.fromtimestamp(t).date().isoformat() for t in times if 0 <= t < 1e11)
    if not days:
        return "Recorded by outergrad"
    return f"Recorded on {days[0]}" if days[0] == days[-1] else f"Recorded {days[0]} to {days[-1]}"


def _table(summaries: dict[str, Summary]) -> str:
    scalars = columns_of(list(summaries.values()))
    fewer = "Fewer bytes than DDP"
    heads = ["Sites", "Steps", "Sent per step", fewer, "Time per step", *map(_final, scalars)]
    head = "".join(f"<th scope=col>{escape(text)}</th>" for text in ["Run", *heads])
    rows = [_row(name, found, heads, _cells(found, scalars)) for name, found in summaries.items()]
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"


def _final(name: str) -> str:
    return f"Final {name}"


def _cells(found: Summary, scalars: Sequence[str]) -> list[str]:
    return [
        str(found.sites),
        str(found.steps),
        _told(found.sent_bytes, amount),
        _saving(found),
        _told(found.step_s, seconds),
        *(_told(found.finals.get(name), plain) for name in scalars),
    ]


def _told(value: float | None, form: Callable[[float], str]) -> str:
    return _NOTHING if value is None else form(value)


def _saving(found: Summary) -> str:
    """How many times fewer bytes than DDP's, as ``19×``."""
    if not found.sent_bytes or not found.dense_bytes:
        return _NOTHING
    ratio = found.dense_bytes / found.sent_bytes
    return f"{times(ratio)}{_TIMES}" if ratio >= 0.995 else f"{times(1 / ratio)}{_TIMES} more"


def _row(name: str, found: Summary, heads: Sequence[str], cells: Sequence[str]) -> str:
    """Every cell says its column, which a phone shows beside it."""
    method = escape(found.method or "method not known")
    others = [
        f'<td data-head="{escape(head)}">{escape(cell)}</td>'
        for head, cell in zip(heads, cells, strict=True)
    ]
    first = f"<th scope=row>{escape(name)}<span class=method>{method}</span></th>"
    return f"<tr>{first}{''.join(others)}</tr>"


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    lines = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    count = f"What was wrong with the files ({len(problems)})"
    opened = " open" if len(problems) <= 6 else ""
    return f"<details class=problems{opened}><summary>{count}</summary><ul>{lines}</ul></details>"
