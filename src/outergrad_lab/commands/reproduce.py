"""``outergrad reproduce``."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outergrad.core.packages import require
from outergrad.launch.console import errors_in_one_line
from outergrad.launch.errors import RecipeError
from outergrad.tools.commands.options import DATA_DIR, DataDir
from outergrad_lab.experiments.narrowing import Part
from outergrad_lab.experiments.run import Outcome, draw, run
from outergrad_lab.experiments.spec import Experiment, experiment, names

Names = Annotated[
    list[str] | None,
    typer.Argument(help="Experiments, of those that --list shows; all; or a YAML of your own."),
]
ListThem = Annotated[
    bool, typer.Option("--list", help="Say what each shows and how long it takes.")
]
Full = Annotated[bool, typer.Option("--full", help="The paper's size instead of the small one.")]
Out = Annotated[Path, typer.Option(help="Folder that gets a folder per experiment.")]
Draw = Annotated[
    bool, typer.Option("--draw", help="Run nothing: write tables and figures of what is there.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        help="Run only what has a setting of this value, as a workload, a method or lr=0.001; "
        "repeatable.",
        show_default="all",
    ),
]
Seeds = Annotated[
    int | None, typer.Option(min=1, help="Run so many seeds.", show_default="all of them")
]
Steps = Annotated[
    int | None,
    typer.Option(min=1, help="Train for so many steps.", show_default="the experiment's"),
]


def reproduce(
    wanted: Names = None,
    listed: ListThem = False,
    full: Full = False,
    out: Out = Path("reproduced"),
    data_dir: DataDir = DATA_DIR,
    draw_only: Draw = False,
    only: Only = None,
    seeds: Seeds = None,
    steps: Steps = None,
) -> None:
    """Run an experiment of the paper from its YAML, and write tables, figures and a page.

    Sites are threads of this process. Finished runs are kept: the same command continues where it
    stopped.
    """
    with errors_in_one_line():
        try:
            require("yaml", "pandas", "seaborn", "jinja2")
        except ImportError as error:
            raise RecipeError(str(error)) from error
        if listed or not wanted:
            _list(full=full)
            return
        part = Part(only=tuple(only or ()), seeds=seeds, steps=steps)
        for name in names() if wanted == ["all"] else wanted:
            whole = experiment(name, full=full)
            folder = out / (f"{whole.name}-full" if full else whole.name)
            _reproduce(whole, part, folder, data_dir, draw_only=draw_only)


def _reproduce(
    whole: Experiment, part: Part, folder: Path, data_dir: Path, *, draw_only: bool
) -> None:
    found = part.of(whole)
    if draw_only:
        print(draw(found, folder, whole).resolve())
        return
    outcome = run(found, folder, data_dir, whole)
    for reason in dict.fromkeys(outcome.skipped):
        print(f"outergrad: left out: {reason}", file=sys.stderr)
    print(_last_line(found.name, outcome))


def _last_line(name: str, outcome: Outcome) -> str:
    before = outcome.tasks - outcome.new - len(outcome.skipped)
    earlier = f", {before} of them earlier" if before else ""
    minutes = f"{outcome.seconds / 60:.1f} min"
    return f"{name}: {outcome.tasks} runs{earlier}, {minutes}: {outcome.page.resolve()}"


def _list(*, full: bool) -> None:
    table = Table("name", "what it shows", "runs", "minutes")
    for name in names():
        found = experiment(name, full=full)
        minutes = "" if full else f"{found.minutes:.0f}"
        table.add_row(name, f"{found.title}: {found.shows}", str(found.runs), minutes)
    Console().print(table)
    print("minutes of the small size on 2 cores; outergrad reproduce NAME runs one, all runs all")
