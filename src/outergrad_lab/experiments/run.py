"""Runs the missing tasks of an experiment, and writes all results."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from outergrad._event_lines import GrowingFile, parsed
from outergrad._version import __version__
from outergrad.launch.errors import RecipeError
from outergrad.launch.machine import cores, processor
from outergrad.record.jsonl import open_to_append
from outergrad_lab.experiments.coverage import write_coverage
from outergrad_lab.experiments.figures import write_figures
from outergrad_lab.experiments.kinds import KINDS
from outergrad_lab.experiments.page import write_page
from outergrad_lab.experiments.spec import Experiment
from outergrad_lab.experiments.sweeps import due
from outergrad_lab.experiments.tables import write_tables
from outergrad_lab.experiments.task import Context, Task

Result = dict[str, Any]


class Store:
    """Folder of an experiment.

    Args:
        folder: The folder; its tables and figures lie here, too.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "results.jsonl"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from running the same tasks.

        Raises:
            RecipeError: Another process runs them, or the folder cannot be written to.
        """
        lock = FileLock(self.folder / "results.lock", timeout=0)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            held = lock.acquire()
        except Timeout:
            raise RecipeError(f"--out {self.folder}: another process runs it there") from None
        except OSError as error:
            raise RecipeError(f"--out {self.folder}: {error.strerror}") from error
        with held:
            yield

    def results(self, tasks: Sequence[Task]) -> list[Result]:
        """Returns the results of those tasks that are done, in the order of tasks."""
        found = {result["key"]: result for result in self._read()}
        return [found[task.key] for task in tasks if task.key in found]

    def missing(self, tasks: Sequence[Task]) -> list[Task]:
        """Returns the tasks without a result."""
        found = {result["key"] for result in self._read()}
        return [task for task in tasks if task.key not in found]

    def add(self, task: Task, values: Result) -> None:
        """Stores the result of a task, with versions, machine and time.

        Raises:
            RecipeError: The folder cannot be written to.
        """
        about = {
            "outergrad": __version__,
            "torch": str(torch.__version__),
            "machine": f"{processor()}, {cores()} cores",
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        own = {"key": task.key, "kind": task.kind, "settings": dict(task.settings)}
        line = json.dumps(_plain({**own, **values, **about}), allow_nan=False)
        try:
            with open_to_append(self._path) as file:
                file.write(line + "\n")
        except OSError as error:
            raise RecipeError(f"--out {self.folder}: {error.strerror}") from error

    def _read(self) -> list[Result]:
        if not self._path.is_file():
            return []
        file = GrowingFile(self._path)
        found = map(parsed, [*file.lines()[0], file.rest])
        return [line for line in found if line and _is_whole(line)]


def _is_whole(result: Result) -> bool:
    return isinstance(result.get("key"), str) and "seconds" in result


def _plain(value: Any) -> Any:
    """Rounds numbers to ten digits, and replaces infinity and NaN by None."""
    if isinstance(value, float):
        return float(f"{value:.10g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


_WIDTH = 48


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of an experiment.

    Attributes:
        page: The report.
        tasks: Number of its tasks.
        new: Number of the tasks that ran now.
        seconds: Seconds that all tasks took, whenever they ran.
        skipped: Reasons why some did not run on this machine.
    """

    page: Path
    tasks: int
    new: int
    seconds: float
    skipped: tuple[str, ...]


def run(
    experiment: Experiment, folder: Path, data_dir: Path, whole: Experiment | None = None
) -> Outcome:
    """Runs the tasks that have no result yet, with a bar, and writes tables, figures and a page.

    Args:
        experiment: Experiment to run.
        folder: Folder for its results; a later call continues from these.
        data_dir: Folder of the data sets.
        whole: Experiment of which it is a part, if it is one.

    Raises:
        RecipeError: The user made a mistake; finished runs are kept.
        SiteError: A site failed; finished runs are kept.
    """
    with Store(folder).locked():
        return _run(experiment, folder, data_dir, whole or experiment)


def _run(experiment: Experiment, folder: Path, data_dir: Path, whole: Experiment) -> Outcome:
    store = Store(folder)
    total, done, new = experiment.runs, len(store.results(experiment.tasks)), 0
    skipped: list[str] = []
    with _bars(Console(stderr=True)) as bars:
        all_tasks = bars.add_task(experiment.name, total=total, completed=done)
        for at, task in enumerate(_missing(experiment, store), start=done + 1):
            began = time.perf_counter()
            values = _ran(experiment, task, store, _context(bars, task, data_dir))
            seconds = time.perf_counter() - began
            if "skipped" in values:
                skipped.append(f"{task.kind}: {values['skipped']}")
            else:
                store.add(task, {**values, "seconds": seconds})
                new += 1
            bars.remove_task(bars.task_ids[-1])
            bars.advance(all_tasks)
            if bars.disable:
                line = f"{at}/{total} {task}: {seconds:.0f} s"
                bars.console.print(line, soft_wrap=True)
    return Outcome(
        page=draw(experiment, folder, whole),
        tasks=total,
        new=new,
        seconds=sum(result["seconds"] for result in store.results(experiment.tasks)),
        skipped=tuple(skipped),
    )


def _ran(experiment: Experiment, task: Task, store: Store, context: Context) -> Mapping[str, Any]:
    """Runs a task; in a sweep, one whose method does not fit a model is skipped.

    Raises:
        RecipeError: Nothing of the experiment has run yet, or it has no sweep.
    """
    try:
        return KINDS[task.kind](task.settings).run(context)
    except RecipeError as error:
        if not experiment.sweep or not store.results(experiment.tasks):
            raise
        return {"skipped": f"{task}: {error}"}


def _missing(experiment: Experiment, store: Store) -> Iterator[Task]:
    """Yields the tasks that are due and have not run; then those that follow from a sweep."""
    first = store.missing(_due(experiment, store))
    yield from first
    if experiment.sweep:
        tried = {task.key for task in first}
        yield from (t for t in store.missing(_due(experiment, store)) if t.key not in tried)


def _due(experiment: Experiment, store: Store) -> list[Task]:
    return due(experiment.tasks, store.results(experiment.tasks), experiment.sweep)


def _bars(console: Console) -> Progress:
    """Returns bars for all tasks and for the present one; disabled if there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    terminal = console.is_terminal
    return Progress(*columns, *times, console=console, disable=not terminal, transient=True)


def _context(bars: Progress, task: Task, data_dir: Path) -> Context:
    text = str(task)
    bar = bars.add_task(text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…", total=None)
    return Context(
        data_dir=data_dir,
        steps=lambda count: bars.update(bar, total=count),
        advance=lambda: bars.advance(bar),
    )


def draw(experiment: Experiment, folder: Path, whole: Experiment | None = None) -> Path:
    """Writes tables, figures and the page of all results so far.

    Raises:
        RecipeError: There is no result, a table or figure names what is not there, or the folder
            cannot be written to.
    """
    results = Store(folder).results(experiment.tasks)
    if not results:
        raise RecipeError(f"nothing has run yet that could be drawn: {experiment.command}")
    try:
        tables = write_tables(experiment.tables, results, folder)
        if experiment.sweep:
            tables.append(write_coverage(whole or experiment, results, folder))
        figures = write_figures(experiment.figures, results, folder)
        return write_page(experiment, results, tables, figures, folder)
    except OSError as error:
        raise RecipeError(f"--out {error.filename or folder}: {error.strerror}") from error
