"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

DataDir = Annotated[Path, typer.Option(envvar="OUTERGRAD_DATA", help="Folder of the data sets.")]
DATA_DIR = Path("data")
