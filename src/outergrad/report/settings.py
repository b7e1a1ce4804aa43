"""Panel of the page with the runs' settings and machines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape

from outergrad._amounts import amount, many
from outergrad.report.recording import Recording


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
            yield f"Site {site}", str(machine)
