"""``outergrad site``."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from outergrad.launch.console import errors_in_one_line
from outergrad.launch.errors import RecipeError
from outergrad.session.farewell import leave_all
from outergrad.star.transport import KIT_VARIABLE


def site(
    script: Annotated[Path, typer.Argument(help="Of the training, as train.py.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script is given.")] = None,
    kit: Annotated[Path, typer.Option(help="File that `outergrad hub invite` has written.")] = Path(
        "site.kit"
    ),
) -> None:
    """Run a training script as a site of a star: og.Star() in it takes this kit.

    Options of the command come before the script: outergrad site --kit a.kit train.py --epochs 3
    """
    with errors_in_one_line():
        for file in (script, kit):
            if not file.is_file():
                raise RecipeError(f"there is no file {file}")
    os.environ[KIT_VARIABLE] = str(kit.resolve())
    sys.argv = [str(script), *(arguments or [])]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit:
        leave_all()
        raise
    leave_all()  # the command ends without what Python does at its end
