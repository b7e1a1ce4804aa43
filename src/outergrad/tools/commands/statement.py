"""Command ``outergrad statement``."""

from pathlib import Path
from typing import Annotated

import typer

from outergrad.launch.console import errors_in_one_line
from outergrad.launch.errors import RecipeError
from outergrad.report import UnreadableRunError
from outergrad.report.statement import as_text, statement_of, write_statement

Records = Annotated[
    list[Path],
    typer.Argument(
        help="Folders that og.JSONL wrote, or single files, of the sites of one session."
    ),
]
Out = Annotated[Path, typer.Option("--out", "-o", help="The page.", dir_okay=False)]
Text = Annotated[bool, typer.Option("--text", help="Print it here, and write no page.")]


def statement(records: Records, out: Out = Path("statement.html"), text: Text = False) -> None:
    """State who took part in a session, what travelled, and what others could learn.

    A page to print and hand in, from what the sites recorded: outergrad statement runs/first
    """
    with errors_in_one_line():
        try:
            found = statement_of(records)
            if text:
                print(as_text(found))
                return
            write_statement(found, out)
        except (ImportError, UnreadableRunError) as error:
            raise RecipeError(str(error)) from None
        except OSError as error:
            raise RecipeError(f"{error.filename or out}: {error.strerror}") from None
        print(out.resolve())
