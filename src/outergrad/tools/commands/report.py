"""Command ``outergrad report``."""

import time
from pathlib import Path
from typing import Annotated

import typer

from outergrad._amounts import amount
from outergrad.launch.console import errors_in_one_line, say
from outergrad.launch.errors import RecipeError
from outergrad.report import UnreadableRunError, write_page
from outergrad.report.page import Page

EVERY_S = 5
Runs = Annotated[list[Path], typer.Argument(help="Folders that og.JSONL wrote, or single files.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="The page.", dir_okay=False)]
Live = Annotated[
    bool,
    typer.Option(
        "--live", help="Write the page anew every few seconds, and let it reload, until runs end."
    ),
]


def report(runs: Runs, out: Out = Path("report.html"), live: Live = False) -> None:
    """Draw recorded runs on one page that opens anywhere, without a network.

    Ranks, bytes, seconds and spectra of every layer: outergrad report runs/a runs/b
    """
    with errors_in_one_line():
        page = _follow(runs, out) if live else _written(runs, out)
        for problem in page.problems:
            say(problem)
        print(_where(page))


def _written(runs: list[Path], out: Path, reload_s: int | None = None) -> Page:
    try:
        return write_page(runs, out, reload_s=reload_s)
    except (ImportError, UnreadableRunError) as error:
        raise RecipeError(str(error)) from None
    except OSError as error:
        raise RecipeError(f"-o {out}: {error.strerror}") from None


def _follow(runs: list[Path], out: Path) -> Page:
    """Rewrites the page until all runs have ended; after Ctrl-C once more, without reloading."""
    page = _written(runs, out, EVERY_S)
    if not page.ended:
        print(
            f"{_where(page)}: follows every {EVERY_S} s, until the runs end or Ctrl-C", flush=True
        )
    try:
        while not page.ended:
            time.sleep(EVERY_S)
            page = _written(runs, out, EVERY_S)
    except KeyboardInterrupt:
        page = _written(runs, out)
    return page


def _where(page: Page) -> str:
    return f"{page.path.resolve()} ({amount(page.size_bytes)})"
