"""Runs what an experiment still lacks, and writes what there is."""

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
    """What came of an experiment.

    Attributes:
        page: The report.
        tasks: How many tasks it has.
        new: How many of them ran now.
        seconds: How long all of them took, whenever they ran.
        skipped: Why some did not run on this machine.
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
        experiment: What to run.
        folder: For its results; a later call goes on from what lies there.
        data_dir: Folder of the data sets.
        whole: That of which it is a part, if it is.

    Raises:
        RecipeError: The user must mend something; what has run is kept.
        SiteError: A site failed; what has run is kept.
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
    """What came of a task; of many methods one that does not fit a model is left out.

    Raises:
        RecipeError: Nothing of the experiment has run yet, or it is not of many methods.
    """
    try:
        return KINDS[task.kind](task.settings).run(context)
    except RecipeError as error:
        if not experiment.sweep or not store.results(experiment.tasks):
            raise
        return {"skipped": f"{task}: {error}"}


def _missing(experiment: Experiment, store: Store) -> Iterator[Task]:
    """What is due and has not run; what follows from a sweep once it has."""
    first = store.missing(_due(experiment, store))
    yield from first
    if experiment.sweep:
        tried = {task.key for task in first}
        yield from (t for t in store.missing(_due(experiment, store)) if t.key not in tried)


def _due(experiment: Experiment, store: Store) -> list[Task]:
    return due(experiment.tasks, store.results(experiment.tasks), experiment.sweep)


def _bars(console: Console) -> Progress:
    """Bars for all tasks and for the present one; lines instead where there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    terminal = console.is_terminal
    return Progress(*columns, *times, console=console, disable=not terminal, transient=True)


def _context(bars: Progress, task: Task, data_dir: Path) -> Context:
    """With a bar for the task."""
    text = str(task)
    bar = bars.add_task(text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…", total=None)
    return Context(
        data_dir=data_dir,
        steps=lambda count: bars.update(bar, total=count),
        advance=lambda: bars.advance(bar),
    )


def draw(experiment: Experiment, folder: Path, whole: Experiment | None = None) -> Path:
    """Writes tables, figures and the page of what has run so far.

    Raises:
        RecipeError: There is nothing, a table or figure asks for what is not there, or the
            folder cannot be written to.
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
