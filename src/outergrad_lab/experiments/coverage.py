"""Overview of the runs of an experiment that are done, and of those that are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from outergrad._whole_files import write_whole
from outergrad_lab.experiments.frames import Result
from outergrad_lab.experiments.quantities import NOTHING, title
from outergrad_lab.experiments.spec import Experiment
from outergrad_lab.experiments.sweeps import best_values, group
from outergrad_lab.experiments.tables import Table
from outergrad_lab.experiments.task import Settings
from outergrad_lab.labels import Method

_PLACE = ("workload", "sites")


def write_coverage(whole: Experiment, results: Sequence[Result], folder: Path) -> Table:
    """Writes runs.md: planned and finished runs by workload and number of sites.

    Args:
        whole: The whole experiment, before it was narrowed.
        results: Results of its runs, or of runs with fewer steps.
        folder: Folder of the experiment.
    """
    from pandas import DataFrame

    planned = [task.settings for task in whole.tasks if task.kind == "training"]
    done = [result for result in results if result["kind"] == "training"]
    rows = [_row(place, planned, done, whole.sweep) for place in _places(planned)]
    cells = DataFrame([{title(name): text for name, text in row.items()} for row in rows])
    table = Table(name="runs", title="What has run", cells=cells, keys=len(_PLACE))
    write_whole(folder / "runs.md", table.markdown)
    return table


def _places(all_settings: Iterable[Settings]) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(map(_place, all_settings)))


def _place(settings: Settings) -> tuple[Any, ...]:
    return tuple(settings.get(name) for name in _PLACE)


def _row(
    place: tuple[Any, ...], planned: Sequence[Settings], done: Sequence[Result], swept: str
) -> dict[str, str]:
    wanted = [settings for settings in planned if _place(settings) == place]
    here = [result for result in done if _place(result["settings"]) == place]
    found = [result["settings"] for result in here]
    missing = [m for m in _values("method", wanted) if m not in _values("method", found)]
    row = {name: str(value) for name, value in zip(_PLACE, place, strict=True)}
    for name in ("steps", "seed", swept):
        row[name] = f"{_listed(name, found)} of {_listed(name, wanted)}"
    row["methods"] = f"{len(_values('method', found))} of {len(_values('method', wanted))}"
    row["not run"] = "; ".join(Method.parse(m).label for m in missing) if found else "all"
    row[f"best {title(swept)} at the edge"] = _at_the_edge(here, swept) or NOTHING
    return row


def _values(name: str, all_settings: Iterable[Settings]) -> list[Any]:
    return list(dict.fromkeys(s[name] for s in all_settings if name in s))


def _listed(name: str, all_settings: Iterable[Settings]) -> str:
    return ", ".join(f"{value:g}" for value in sorted(_values(name, all_settings))) or NOTHING


def _at_the_edge(results: Sequence[Result], swept: str) -> str:
    """Returns methods whose best value is the smallest or the largest one that was tried."""
    best = best_values(results, swept)
    found: dict[str, str] = {}
    for result in results:
        settings = result["settings"]
        key = group(settings, swept)
        tried = [r["settings"][swept] for r in results if group(r["settings"], swept) == key]
        if len(set(tried)) > 1 and best[key] in (min(tried), max(tried)):
            found[settings["method"]] = f"{Method.parse(settings['method']).label} ({best[key]:g})"
    return "; ".join(found.values())
