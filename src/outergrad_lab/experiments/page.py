"""The page of an experiment: its text, tables, figures and style in one file."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from outergrad._amounts import duration
from outergrad._whole_files import write_whole
from outergrad.report.skeleton import asset, whole_page
from outergrad_lab.experiments.frames import Result
from outergrad_lab.experiments.quantities import text, title
from outergrad_lab.experiments.tables import Cell, Table

if TYPE_CHECKING:
    from outergrad_lab.experiments.spec import Experiment

_KINDS = {
    "training": "Trainings",
    "timing": "Step times",
    "sites": "Numbers of sites",
    "iterations": "Power iterations",
}


def write_page(
    experiment: Experiment,
    results: Iterable[Result],
    tables: Sequence[Table],
    figures: Sequence[Path],
    folder: Path,
) -> Path:
    """Writes report.html, which needs nothing else to be opened.

    Raises:
        OSError: A figure cannot be read, or the page not be written.
    """
    path = folder / "report.html"
    write_whole(path, _page(experiment, list(results), tables, figures))
    return path


def _page(
    experiment: Experiment,
    results: Sequence[Result],
    tables: Sequence[Table],
    figures: Sequence[Path],
) -> str:
    facts = "".join(f"<dt>{head}</dt><dd>{fact}</dd>" for head, fact in _facts(experiment, results))
    runs = "".join(_runs(kind, results) for kind in _KINDS)
    sections = (
        _section("Tables", map(_table, tables)),
        _section("Figures", map(_figure, figures)),
        f'<section id="runs">\n<h2>Runs</h2>\n{runs}\n</section>',
    )
    return whole_page(
        command="outergrad reproduce",
        about=f" · {experiment.name}, {experiment.size} size",
        title=experiment.title,
        lead=experiment.shows,
        head=f'<dl class="facts">{facts}</dl>',
        body="\n".join(["<main>", *sections, "</main>"]),
        style=asset("page.css", "outergrad_lab.experiments"),
    )


def _facts(experiment: Experiment, results: Sequence[Result]) -> list[tuple[str, str]]:
    """Headings and what stands behind them, as HTML; none that would be empty."""
    found = [
        ("Claim", escape(experiment.claim)),
        ("Command", f"<code>{escape(experiment.command)}</code>"),
        ("Took", _took(results) if results else ""),
        ("Machine", _all("machine", results)),
        ("Versions", _versions(results)),
        ("Finished", _days(results)),
    ]
    return [(head, fact) for head, fact in found if fact]


def _took(results: Sequence[Result]) -> str:
    seconds = sum(result.get("seconds") or 0 for result in results)
    return f"{duration(seconds)} in {len(results)} run{'s' if len(results) > 1 else ''}"


def _all(name: str, results: Sequence[Result]) -> str:
    """The different values, in words."""
    return "; ".join(dict.fromkeys(escape(str(r[name])) for r in results if r.get(name)))


def _versions(results: Sequence[Result]) -> str:
    found = {"outergrad": _all("outergrad", results), "PyTorch": _all("torch", results)}
    return ", ".join(f"{name} {versions}" for name, versions in found.items() if versions)


def _days(results: Sequence[Result]) -> str:
    days = sorted({escape(str(r["finished"])[:10]) for r in results if r.get("finished")})
    return " to ".join(dict.fromkeys(days[:1] + days[-1:]))


def _section(head: str, parts: Iterable[str]) -> str:
    inside = "".join(parts)
    return f"<section id={head.lower()}>\n<h2>{head}</h2>\n{inside}</section>" if inside else ""


def _table(table: Table) -> str:
    return f"<figure><figcaption>{escape(table.title)}</figcaption>{_grid(table)}</figure>\n"


def _grid(table: Table) -> str:
    heads = "".join(
        f"<th scope=col{_key(at, table)}>{escape(head)}</th>" for at, head in enumerate(table.heads)
    )
    rows = "".join(f"<tr>{''.join(_cells(table, row))}</tr>" for row in table.rows)
    inside = f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody>"
    return f"<div class=scroll><table class=results>{inside}</table></div>"


def _key(at: int, table: Table) -> str:
    return " class=key" if at < table.keys else ""


def _cells(table: Table, row: Sequence[Cell]) -> Iterable[str]:
    for at, cell in enumerate(row):
        spread = f"<span class=spread>{escape(cell.spread)}</span>" if cell.spread else ""
        tag = "th scope=row" if at < table.keys else "td"
        yield f"<{tag}{_key(at, table)}>{escape(cell.text)}{spread}</{tag[:2]}>"


def _figure(path: Path) -> str:
    picture = b64encode(path.read_bytes()).decode()
    shown = escape(_title(path))
    image = f'<img src="data:image/png;base64,{picture}" alt="{shown}">'
    return f"<figure><div class=scroll>{image}</div></figure>\n"


def _title(path: Path) -> str:
    """What the picture says it is; see `write_figures`."""
    from PIL import Image

    with Image.open(path) as picture:
        return str(picture.info.get("Title", path.stem))


def _runs(kind: str, results: Sequence[Result]) -> str:
    """What all runs of a kind have in common, and a table of the rest."""
    runs = [result for result in results if result["kind"] == kind]
    if not runs:
        return ""
    names = list(dict.fromkeys(name for run in runs for name in run["settings"]))
    same = [name for name in names if len({_setting(run, name) for run in runs}) == 1]
    shared = ", ".join(f"{title(name)} {_setting(runs[0], name)}" for name in same)
    others = [name for name in names if name not in same]
    return (
        f"<details><summary>{_KINDS[kind]} ({len(runs)})</summary>"
        f"<p class=what>{escape(shared)}</p>{_grid(_run_table(runs, others))}</details>\n"
    )


def _run_table(runs: Sequence[Result], names: Sequence[str]) -> Table:
    rows = [
        (*(_setting(run, name) for name in names), duration(run.get("seconds") or 0))
        for run in runs
    ]
    return Table(
        name="runs",
        title="Runs",
        heads=(*map(title, names), "took"),
        keys=len(names),
        rows=tuple(tuple(map(Cell, row)) for row in rows),
    )


def _setting(run: Result, name: str) -> str:
    value = run["settings"].get(name)
    return (
        ", ".join(text(name.removesuffix("s"), v) for v in value)
        if isinstance(value, list)
        else text(name, value)
    )
