"""The commands of ``outergrad``."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outergrad.recipes.console import download_bars, errors_in_one_line
from outergrad.recipes.data import SOURCES, get_command, missing_files, require_files
from outergrad.recipes.download import download
from outergrad.recipes.errors import RecipeError
from outergrad.recipes.job import Job
from outergrad.recipes.launch import number_of_sites, run_sites, under_torchrun
from outergrad.recipes.models import MODELS
from outergrad.recipes.replica import DADS, METHODS
from outergrad.recipes.split import SPLITS
from outergrad.recipes.train import train as train_site

app = typer.Typer(
    help="Distributed auto-differentiation for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

DataDir = Annotated[Path, typer.Option(envvar="OUTERGRAD_DATA", help="Folder of the data sets.")]
Data = Annotated[str, typer.Option(help=f"Data set: {', '.join(SOURCES)}.")]
Model = Annotated[str, typer.Option(help=f"Model: {', '.join(MODELS)}.")]
Method = Annotated[str, typer.Option(help=f"What the sites exchange: {', '.join(METHODS)}.")]
Sites = Annotated[
    int | None,
    typer.Option(min=1, help="Local processes to start: 2, unless torchrun has started some."),
]
Split = Annotated[str, typer.Option(help=f"Which rows a site holds: {', '.join(SPLITS)}.")]
Reveal = Annotated[str, typer.Option(help=f"What dad shows of a site: {', '.join(DADS)}.")]
Epochs = Annotated[int, typer.Option(help="Passes over the data.")]
BatchSize = Annotated[int, typer.Option(help="Rows per site and step.")]
LearningRate = Annotated[float, typer.Option("--lr", help="Learning rate of Adam.")]
Seed = Annotated[int, typer.Option(help="Of the weights, the split and the order of the rows.")]
Widths = Annotated[str, typer.Option(help="Features of each hidden layer.")]
Log = Annotated[
    Path | None, typer.Option(help="File that gets a line of JSON per epoch.", dir_okay=False)
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show how each parameter travels, and tracebacks.")
]
Url = Annotated[str, typer.Option(help="Folder on the net to download from instead.")]
DATA_DIR = Path("data")
WIDTHS = "-".join(map(str, Job.widths))


@app.command()
def train(
    data: Data = Job.data,
    model: Model = Job.model,
    method: Method = Job.method,
    sites: Sites = None,
    split: Split = Job.split,
    reveal: Reveal = Job.reveal,
    epochs: Epochs = Job.epochs,
    batch_size: BatchSize = Job.batch_size,
    lr: LearningRate = Job.lr,
    seed: Seed = Job.seed,
    widths: Widths = WIDTHS,
    data_dir: DataDir = DATA_DIR,
    log: Log = None,
    verbose: Verbose = False,
) -> None:
    """Train a model at several sites: under torchrun, or in local processes."""
    with errors_in_one_line():
        job = Job(
            data=data,
            model=model,
            method=method,
            sites=number_of_sites(sites),
            split=split,
            reveal=reveal,
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            seed=seed,
            widths=parse_widths(widths),
        )
        work = partial(train_site, job, data_dir=data_dir, log=log, verbose=verbose)
        if not under_torchrun():
            require_files(data, data_dir)
        run_sites(work, 1 if method == "pooled" else job.sites, verbose=verbose)


def parse_widths(text: str) -> tuple[int, ...]:
    """Reads ``512-512`` as two widths, and nothing as none."""
    try:
        return tuple(int(width) for width in text.split("-")) if text else ()
    except ValueError:
        raise RecipeError(f"--widths must look like 512-512, not {text!r}") from None


@data_app.command("list")
def list_data(data_dir: DataDir = DATA_DIR) -> None:
    """List the data sets and whether they are there."""
    table = Table("name", "what", "state")
    for name, source in SOURCES.items():
        absent = missing_files(name, data_dir)
        table.add_row(name, source.summary, get_command(name, data_dir) if absent else "ready")
    Console().print(table)


@data_app.command("get")
def get_data(name: str, data_dir: DataDir = DATA_DIR, url: Url = "") -> None:
    """Download a data set; files that are right already stay."""
    with errors_in_one_line():
        if name not in SOURCES:
            raise RecipeError(f"no data set {name!r}: there are {', '.join(SOURCES)}")
        with download_bars() as bars:
            files = download(SOURCES[name], data_dir / name, bars, url)
        print(f"{name} is ready: {len(files)} files downloaded")
