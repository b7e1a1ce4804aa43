"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from outergrad.tools.named_methods.attach import METHODS

DataDir = Annotated[Path, typer.Option(envvar="OUTERGRAD_DATA", help="Folder of the data sets.")]
DATA_DIR = Path("data")
METHOD_HELP = f"{', '.join(METHODS)}, or with settings, as rank-dad:rank=16:tolerance=0.1"
