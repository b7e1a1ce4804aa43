"""``outergrad train``."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from outergrad.launch.console import errors_in_one_line, say
from outergrad.launch.errors import RecipeError
from outergrad.launch.simulate import simulate as run_simulated
from outergrad.launch.start import number_of_sites, run_sites, start_sites, under_torchrun
from outergrad.launch.supervise import Attempt, Restarts, supervise
from outergrad.tools.commands.options import DATA_DIR, DataDir
from outergrad_lab.data import SOURCES, require_files
from outergrad_lab.models import MODELS
from outergrad_lab.models.small import ACTIVATIONS
from outergrad_lab.peers.named import METHOD_HELP, is_peer
from outergrad_lab.training.job import OPTIMIZERS, Job
from outergrad_lab.training.saving import Saving
from outergrad_lab.training.split import SPLITS
from outergrad_lab.training.train import Files
from outergrad_lab.training.train import train as train_site

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
LearningRate = Annotated[float, typer.Option("--lr", help="Learning rate.")]
Optimizer = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(OPTIMIZERS)}: SGD without and with a momentum of 0.9, signSGD, and Muon "
        "for matrices with Adam for all else."
    ),
]
Decay = Annotated[
    float, typer.Option(help="Share of the rate at the end, reached by a cosine; 1: constant.")
]
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
        "--local",
        "--local-part",
        help="Pattern of parameters that a site keeps to itself, as 'encoder.*'; repeatable; "
        "--local-part under torchrun.",
        show_default="none",
    ),
]
Joint = Annotated[
    bool, typer.Option("--joint", help="Let the mean delta of all sites flow back into these.")
]
Log = Annotated[
    Path | None,
    typer.Option(
        "--log",
        "--log-file",
        help="File that gets a line of JSON per epoch; --log-file under torchrun.",
        dir_okay=False,
    ),  # torchrun takes --log and --local for abbreviations of options of its own
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
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        help="Folder, of the sites together or each its own, to save the training in and to go "
        "on from.",
        file_okay=False,
    ),
]
CheckpointEvery = Annotated[int, typer.Option(min=1, help="Save after every so many steps.")]
MaxRestarts = Annotated[
    int, typer.Option(min=0, help="Start the sites again so often when one fails.")
]
MinSites = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Go on without a site that is lost, with at least so many; it is taken back.",
        show_default="all are needed",
    ),
]
AllowLost = Annotated[
    bool,
    typer.Option(
        "--allow-lost",
        help="Go on from checkpoints that lack files of a site; --min-sites and torchrun do.",
    ),
]
AllowForeign = Annotated[
    bool,
    typer.Option(
        "--allow-foreign",
        help="Go on from checkpoints of other sites, where a site has only others of its own.",
    ),
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
    optimizer: Optimizer = Job.optimizer,
    decay: Decay = Job.decay,
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
    checkpoint: Checkpoint = None,
    checkpoint_every: CheckpointEvery = 100,
    max_restarts: MaxRestarts = 0,
    min_sites: MinSites = None,
    allow_lost: AllowLost = False,
    allow_foreign: AllowForeign = False,
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
            optimizer=optimizer,
            decay=decay,
            seed=seed,
            widths=None if widths is None else parse_widths(widths),
            activation=activation,
            local=tuple(local or ()),
            joint=joint,
        )
        restarts = Restarts(max_restarts=max_restarts, min_sites=min_sites)
        saving = None
        if checkpoint is not None:
            saving = Saving(
                folder=checkpoint,
                every=checkpoint_every,
                allow_lost=allow_lost or under_torchrun() or min_sites is not None,
                allow_foreign=allow_foreign,
            )
        _check(job, saving, restarts, simulate=simulate)
        files = Files(log, record, every, budget)
        work = partial(
            train_site, job, data_dir=data_dir, files=files, verbose=verbose, saving=saving
        )
        if not under_torchrun():
            require_files(data, data_dir)
        sites = 1 if method == "pooled" else job.sites
        if simulate:
            run_simulated(lambda group, stop: work(group=group, stop=stop), sites)
        elif under_torchrun():
            run_sites(work, sites, verbose=verbose)
        else:
            run = partial(_attempt, work, saving, verbose)
            supervise(run, sites, restarts, say)


def _check(job: Job, saving: Saving | None, restarts: Restarts, *, simulate: bool) -> None:
    """Refuses options that do not go together."""
    if restarts.max_restarts or restarts.min_sites is not None:
        if under_torchrun():
            raise RecipeError(
                "--max-restarts and --min-sites are torchrun's to do: torchrun --max-restarts N, "
                "and --nnodes 2:3 to go on with fewer machines"
            )
        if saving is None or simulate:
            raise RecipeError(
                "--max-restarts and --min-sites need --checkpoint FOLDER, to go on from, and "
                "processes, not --simulate"
            )
        restarts.check(job.sites)
    silent = job.method in ("pooled", "alone")
    if restarts.min_sites is not None and (silent or is_peer(job.method)):
        raise RecipeError(f"--min-sites does not go with --method {job.method}")
    if saving is not None and job.method.startswith("powersgd"):
        raise RecipeError(
            f"--checkpoint does not go with --method {job.method}: PyTorch's hook does not save "
            f"what it remembers; use og-powersgd, as og-powersgd:rank=2"
        )


def _attempt(
    work: Callable[..., bool], saving: Saving | None, verbose: bool, attempt: Attempt
) -> bool:
    """Starts some of the sites; returns whether they have finished the job."""
    if saving is not None:
        saving = replace(saving, pause_after=attempt.pause_after)
    present = None if attempt.pause_after is None else attempt.sites
    site = partial(work, saving=saving, present=present)
    return all(start_sites(site, attempt.sites, verbose=verbose))


def parse_widths(text: str) -> tuple[int, ...]:
    """Parses ``512-512`` as two widths, and an empty text as none."""
    try:
        return tuple(int(width) for width in text.split("-")) if text else ()
    except ValueError:
        raise RecipeError(f"--widths must look like 512-512, not {text!r}") from None
