"""Runs what an experiment still lacks, and writes what there is."""

import time
from dataclasses import dataclass
from pathlib import Path

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
from outergrad_lab.experiments.figures import write_figures
from outergrad_lab.experiments.kinds import KINDS
from outergrad_lab.experiments.page import write_page
from outergrad_lab.experiments.spec import Experiment
from outergrad_lab.experiments.store import Store
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


def run(experiment: Experiment, folder: Path, data_dir: Path) -> Outcome:
    """Runs the tasks that have no result yet, with a bar, and writes tables, figures and a page.

    Args:
        experiment: What to run.
        folder: For its results; a later call goes on from what lies there.
        data_dir: Folder of the data sets.

    Raises:
        RecipeError: The user must mend something; what has run is kept.
        SiteError: A site failed; what has run is kept.
    """
    with Store(folder).locked():
        return _run(experiment, folder, data_dir)


def _run(experiment: Experiment, folder: Path, data_dir: Path) -> Outcome:
    store = Store(folder)
    tasks, missing = experiment.tasks, store.missing(experiment.tasks)
    skipped = []
    with _bars(Console(stderr=True)) as bars:
        done = len(tasks) - len(missing)
        whole = bars.add_task(experiment.name, total=len(tasks), completed=done)
        for at, task in enumerate(missing, start=done + 1):
            began = time.perf_counter()
            values = KINDS[task.kind](task.settings).run(_context(bars, task, data_dir))
            seconds = time.perf_counter() - began
            if "skipped" in values:
                skipped.append(f"{task.kind}: {values['skipped']}")
            else:
                store.add(task, {**values, "seconds": seconds})
            bars.remove_task(bars.task_ids[-1])
            bars.advance(whole)
            if bars.disable:
                line = f"{at}/{len(tasks)} {task}: {seconds:.0f} s"
                bars.console.print(line, soft_wrap=True)
    return Outcome(
        page=draw(experiment, folder),
        tasks=len(tasks),
        new=len(missing) - len(skipped),
        seconds=sum(result["seconds"] for result in store.results(tasks)),
        skipped=tuple(skipped),
    )


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


def draw(experiment: Experiment, folder: Path) -> Path:
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
        figures = write_figures(experiment.figures, results, folder)
        return write_page(experiment, results, tables, figures, folder)
    except OSError as error:
        raise RecipeError(f"--out {error.filename or folder}: {error.strerror}") from error
