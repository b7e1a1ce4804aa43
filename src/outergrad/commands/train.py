"""``outergrad train``."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from outergrad.commands.options import DATA_DIR, METHOD_HELP, DataDir
from outergrad.recipes.console import errors_in_one_line
from outergrad.recipes.data import SOURCES, require_files
from outergrad.recipes.errors import RecipeError
from outergrad.recipes.job import Job
from outergrad.recipes.launch import number_of_sites, run_sites, under_torchrun
from outergrad.recipes.models import MODELS
from outergrad.recipes.models.hidden import ACTIVATIONS
from outergrad.recipes.simulate import simulate as run_simulated
from outergrad.recipes.split import SPLITS
from outergrad.recipes.train import Files
from outergrad.recipes.train import train as train_site

Data = Annotated[str, typer.Option(help=f"Data set: {', '.join(SOURCES)}.")]
Model = Annotated[str, typer.Option(help=f"Model: {', '.join(MODELS)}.")]
Method = Annotated[str, typer.Option(help=f"What the sites exchange: {METHOD_HELP}.")]
Sites = Annotated[
    int | None,
    typer.Option(min=1, help="Local processes to start: 2, unless torchrun has started some."),
]
Split = Annotated[str, typer.Option(help=f"Which rows a site holds: {', '.join(SPLITS)}.")]
Epochs = Annotated[int, typer.Option(help="Passes over the data.")]
BatchSize = Annotated[int, typer.Option(help="Rows per site and step, on average.")]
LearningRate = Annotated[float, typer.Option("--lr", help="Learning rate of Adam.")]
Seed = Annotated[int, typer.Option(help="Of the weights, the split and the order of the rows.")]
Widths = Annotated[
    str | None,
    typer.Option(help="Features of each hidden layer, as 512-512.", show_default="the model's own"),
]
Activation = Annotated[
    str | None,
    typer.Option(
        help=f"Between hidden layers: {', '.join(ACTIVATIONS)}.", show_default="the model's own"
    ),
]
Local = Annotated[
    list[str] | None,
    typer.Option(
        help="Pattern of parameters that a site keeps to itself, as 'encoder.*'; repeatable.",
        show_default="none",
    ),
]
Joint = Annotated[
    bool, typer.Option("--joint", help="Let the mean delta of all sites flow back into these.")
]
Log = Annotated[
    Path | None, typer.Option(help="File that gets a line of JSON per epoch.", dir_okay=False)
]
Record = Annotated[
    Path | None,
    typer.Option(
        help="Folder that gets what `outergrad report` and `outergrad watch` show.", file_okay=False
    ),
]
Every = Annotated[int, typer.Option(min=1, help="Record every so many-th step.")]
Budget = Annotated[
    float,
    typer.Option(help="Share of a step that measuring a recorded one may take; inf: no limit."),
]
Simulate = Annotated[
    bool, typer.Option("--simulate", help="Let the sites be threads of one process.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show how each parameter travels, and tracebacks.")
]


def train(
    data: Data = Job.data,
    model: Model = Job.model,
    method: Method = Job.method,
    sites: Sites = None,
    split: Split = Job.split,
    epochs: Epochs = Job.epochs,
    batch_size: BatchSize = Job.batch_size,
    lr: LearningRate = Job.lr,
    seed: Seed = Job.seed,
    widths: Widths = None,
    activation: Activation = None,
    local: Local = None,
    joint: Joint = False,
    data_dir: DataDir = DATA_DIR,
    log: Log = None,
    record: Record = None,
    every: Every = 10,
    budget: Budget = 0.04,
    simulate: Simulate = False,
    verbose: Verbose = False,
) -> None:
    """Train a model at several sites: under torchrun, or in local processes."""
    with errors_in_one_line():
        if simulate and under_torchrun():
            raise RecipeError("--simulate starts its own sites: leave torchrun out")
        job = Job(
            data=data,
            model=model,
            method=method,
            sites=number_of_sites(sites),
            split=split,
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            seed=seed,
            widths=None if widths is None else parse_widths(widths),
            activation=activation,
            local=tuple(local or ()),
            joint=joint,
        )
        files = Files(log, record, every, budget)
        work = partial(train_site, job, data_dir=data_dir, files=files, verbose=verbose)
        processes = 1 if method == "pooled" else job.sites
        if not under_torchrun():
            require_files(data, data_dir)
        if simulate:
            run_simulated(lambda group, stop: work(group=group, stop=stop), processes)
        else:
            run_sites(work, processes, verbose=verbose)


def parse_widths(text: str) -> tuple[int, ...]:
    """Reads ``512-512`` as two widths, and nothing as none."""
    try:
        return tuple(int(width) for width in text.split("-")) if text else ()
    except ValueError:
        raise RecipeError(f"--widths must look like 512-512, not {text!r}") from None
