"""Runs what an experiment still lacks, and writes what there is."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
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
    missing, skipped = store.missing(experiment.tasks), []
    with _Bars(experiment, done=len(experiment.tasks) - len(missing)) as bars:
        for task in missing:
            with bars.shown(task) as context:
                began = time.perf_counter()
                values = KINDS[task.kind].run(task.settings, context(data_dir))
                if "skipped" in values:
                    skipped.append(f"{task.kind}: {values['skipped']}")
                else:
                    store.add(task, {**values, "seconds": time.perf_counter() - began})
    page = draw(experiment, folder)
    seconds = sum(result["seconds"] for result in store.results(experiment.tasks))
    tasks = len(experiment.tasks)
    new = len(missing) - len(skipped)
    return Outcome(page=page, tasks=tasks, new=new, seconds=seconds, skipped=tuple(skipped))


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


class _Bars:
    """One bar for all tasks and one for the present one."""

    def __init__(self, experiment: Experiment, done: int) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self._lines = None if console.is_terminal else console
        self._bars = Progress(
            *columns, *times, console=console, disable=not console.is_terminal, transient=True
        )
        self._count, self._done = len(experiment.tasks), done
        self._all = self._bars.add_task(experiment.name, total=self._count, completed=done)

    def __enter__(self) -> "_Bars":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @contextmanager
    def shown(self, task: Task) -> Iterator["_Shown"]:
        """While a task runs."""
        began = time.perf_counter()
        bar = self._bars.add_task(_short(str(task)), total=None)
        yield _Shown(self._bars, bar)
        self._done += 1
        self._bars.remove_task(bar)
        self._bars.advance(self._all)
        if self._lines:
            took = f"{time.perf_counter() - began:.0f} s"
            self._lines.print(f"{self._done}/{self._count} {task}: {took}", soft_wrap=True)


@dataclass(frozen=True)
class _Shown:
    bars: Progress
    bar: TaskID

    def __call__(self, data_dir: Path) -> Context:
        return Context(
            data_dir=data_dir,
            steps=lambda count: self.bars.update(self.bar, total=count),
            advance=lambda: self.bars.advance(self.bar),
        )


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
