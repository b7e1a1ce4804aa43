"""Runs the missing tasks of an experiment, and writes all results."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from outergrad.launch.errors import RecipeError
from outergrad_lab.experiments.coverage import write_coverage
from outergrad_lab.experiments.figures import write_figures
from outergrad_lab.experiments.kinds import KINDS
from outergrad_lab.experiments.page import write_page
from outergrad_lab.experiments.spec import Experiment
from outergrad_lab.experiments.store import Store
from outergrad_lab.experiments.sweeps import due
from outergrad_lab.experiments.tables import write_tables
from outergrad_lab.experiments.task import Context, Task

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
