"""Command ``outergrad watch``."""

import io
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outergrad.launch.console import errors_in_one_line
from outergrad.launch.errors import RecipeError
from outergrad.launch.processes import exit_on_signals
from outergrad.tools.watch.live import PATTERN, Watch

Run = Annotated[
    Path, typer.Argument(help="Folder that og.JSONL writes to, as runs/mlp; may come later.")
]
Once = Annotated[bool, typer.Option("--once", help="Show what there is now, and end.")]


def watch(run: Run, once: Once = False) -> None:
    """Show a run while it trains: loss, bytes, time, and the rank of every layer.

    For several sites it shows the means of their scalars, bytes and times, and for each layer the
    cosine of the site that agrees least and the error of the site that drops most.
    If the output is not a terminal, it prints a line every 10 seconds. Ctrl-C ends it.
    """
    with errors_in_one_line(), exit_on_signals():
        if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack block characters
            sys.stdout.reconfigure(errors="replace")
        try:
            _watch(Watch(run, Console()), run, once=once)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise RecipeError(f"cannot read {error.filename}: {error.strerror}") from None


def _watch(watch: Watch, run: Path, *, once: bool) -> None:
    if run.exists() and not run.is_dir():
        raise RecipeError(f"{run} is a file: name the folder that it is in")
    if not once:
        watch.follow()
        return
    watch.read()
    if not watch.watched.sites:
        raise RecipeError(_nothing_in(run))
    watch.show()


def _nothing_in(run: Path) -> str:
    """Error text for a folder without events; names folders below it that have some."""
    if not run.exists():
        return f"there is no folder {run}"
    if any(run.glob(PATTERN)):
        return f"no event in {run / PATTERN} yet"
    below = sorted({str(file.parent) for file in run.glob(f"*/{PATTERN}")})
    there = f"; there is in {', '.join(below[:3])}" if below else ""
    return f"no {PATTERN} in {run}{there}"
