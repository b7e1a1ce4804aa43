"""Page of an experiment: its text, tables, figures and style in one file."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outergrad._amounts import duration
from outergrad._whole_files import write_whole
from outergrad.report.page import asset, whole_page
from outergrad_lab.experiments.frames import HEADINGS, Result, of_kind
from outergrad_lab.experiments.quantities import text, title
from outergrad_lab.experiments.tables import Table

if TYPE_CHECKING:
    from outergrad_lab.experiments.spec import Experiment


def write_page(
    experiment: Experiment,
    results: Iterable[Result],
    tables: Sequence[Table],
    figures: Sequence[Path],
    folder: Path,
) -> Path:
    """Writes report.html, a page that needs no other file.

    Raises:
        OSError: A figure cannot be read, or the page not be written.
    """
    path, results = folder / "report.html", list(results)
    page = whole_page(
        command="outergrad reproduce",
        about=f" · {experiment.name}, {experiment.size} size",
        title=experiment.title,
        lead=experiment.shows,
        head=_rendered("facts.html", experiment=experiment, facts=_facts(results)),
        body=_rendered(
            "page.html",
            tables=tables,
            figures=[(_title(path), b64encode(path.read_bytes()).decode()) for path in figures],
            runs=[_runs(kind, found) for kind in HEADINGS if (found := of_kind(kind, results))],
        ),
        style=asset("page.css", "outergrad_lab.experiments"),
    )
    write_whole(path, page)
    return path


def _rendered(name: str, **values: Any) -> str:
    from jinja2 import Template

    text = asset(name, "outergrad_lab.experiments")
    return Template(text, autoescape=True, trim_blocks=True).render(values)


def _facts(results: Sequence[Result]) -> dict[str, str]:
    """Returns headings with their values; values are empty where nothing has run."""
    versions = {"outergrad": _all("outergrad", results), "PyTorch": _all("torch", results)}
    days = sorted({str(result["finished"])[:10] for result in results if result.get("finished")})
    seconds = sum(result.get("seconds") or 0 for result in results)
    runs = f"{len(results)} run{'s' if len(results) > 1 else ''}"
    return {
        "Took": f"{duration(seconds)} in {runs}" if results else "",
        "Machine": _all("machine", results),
        "Versions": ", ".join(f"{name} {found}" for name, found in versions.items() if found),
        "Finished": " to ".join(dict.fromkeys(days[:1] + days[-1:])),
    }


def _all(name: str, results: Sequence[Result]) -> str:
    return "; ".join(dict.fromkeys(str(result[name]) for result in results if result.get(name)))


def _title(path: Path) -> str:
    """Returns the title from a picture's metadata; see `write_figures`."""
    from PIL import Image

    with Image.open(path) as picture:
        return str(picture.info.get("Title", path.stem))


def _runs(kind: str, runs: Sequence[Result]) -> tuple[str, Table]:
    """Returns the common settings of all runs of a kind, and a table of the others."""
    from pandas import DataFrame

    names = list(dict.fromkeys(name for run in runs for name in run["settings"]))
    cells = DataFrame({n: [_setting(n, run["settings"].get(n)) for run in runs] for n in names})
    same = cells.columns[cells.nunique() == 1]
    shared = ", ".join(f"{title(name)} {cells[name][0]}" for name in same)
    rest = cells.drop(columns=same).rename(columns=title)
    took = [duration(run.get("seconds") or 0) for run in runs]
    head = f"{HEADINGS[kind]} ({len(runs)})"
    return shared, Table(name=kind, title=head, cells=rest.assign(took=took), keys=rest.shape[1])


def _setting(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(text(name.removesuffix("s"), one) for one in value)
    return text(name, value)
