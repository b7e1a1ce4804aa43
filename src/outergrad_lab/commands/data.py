"""``outergrad data``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outergrad.launch.console import download_bars, errors_in_one_line
from outergrad.launch.errors import RecipeError
from outergrad.tools.commands.options import DATA_DIR, DataDir
from outergrad.tools.named_methods.attach import did_you_mean
from outergrad_lab.data import (
    SOURCES,
    folder_of,
    get_command,
    missing_files,
    require_files,
    where_to_put,
)
from outergrad_lab.data.download import download

data_app = typer.Typer(help="Data sets.", no_args_is_help=True)

Url = Annotated[str, typer.Option(help="Folder on the net to download from instead.")]


@data_app.command("list")
def list_data(data_dir: DataDir = DATA_DIR) -> None:
    """List the data sets, whether they are there, and where each comes from."""
    table = Table("name", "what, from where, and whether it is there", show_lines=True)
    table.columns[0].no_wrap = True
    for name, source in SOURCES.items():
        terms = f"licence: {source.licence}; to download: {source.size}"
        lines = source.summary, source.origin, terms, _state(name, data_dir)
        table.add_row(name, "\n".join(lines))
    Console().print(table)


def _state(name: str, data_dir: Path) -> str:
    absent = missing_files(name, data_dir)
    if not absent:
        return "ready"
    if SOURCES[name].can_be_fetched:
        return get_command(name, data_dir)
    return where_to_put(name, data_dir, absent)


@data_app.command("get")
def get_data(name: str, data_dir: DataDir = DATA_DIR, url: Url = "") -> None:
    """Download a data set; files that are right already stay."""
    with errors_in_one_line():
        if name not in SOURCES:
            close = did_you_mean(name, [*SOURCES])
            raise RecipeError(f"no data set {name!r}{close}: there are {', '.join(SOURCES)}")
        if not (url or SOURCES[name].can_be_fetched):
            require_files(name, data_dir)
        with download_bars() as bars:
            files = download(SOURCES[name], folder_of(name, data_dir), bars, url)
        print(f"{name} is ready: {len(files)} files downloaded")
