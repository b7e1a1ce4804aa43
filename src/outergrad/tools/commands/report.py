"""``outergrad report``."""

from pathlib import Path
from typing import Annotated

import typer

from outergrad._amounts import amount
from outergrad.launch.console import errors_in_one_line, say
from outergrad.launch.errors import RecipeError
from outergrad.report import UnreadableRunError, write_page

Runs = Annotated[list[Path], typer.Argument(help="Folders that og.JSONL wrote, or single files.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="The page.", dir_okay=False)]


def report(runs: Runs, out: Out = Path("report.html")) -> None:
    """Draw what runs recorded on one page that opens anywhere, without a network.

    Ranks, bytes, seconds and spectra of every layer: outergrad report runs/a runs/b
    """
    with errors_in_one_line():
        try:
            page = write_page(runs, out)
        except (ImportError, UnreadableRunError) as error:
            raise RecipeError(str(error)) from None
        except OSError as error:
            raise RecipeError(f"-o {out}: {error.strerror}") from None
        for problem in page.problems:
            say(problem)
        print(f"{page.path.resolve()} ({amount(page.size_bytes)})")
