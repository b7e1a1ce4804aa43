"""Command ``outergrad plan``."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from outergrad._whole_files import write_whole
from outergrad.launch.console import errors_in_one_line, step_bars
from outergrad.launch.errors import RecipeError
from outergrad.launch.links import parse_link, parse_rate
from outergrad.tools.commands.model_options import Model, Rows
from outergrad.tools.commands.options import METHOD_HELP
from outergrad.tools.plan.forecast import Forecast, Question, forecast
from outergrad.tools.plan.privacy import PrivacyPlan, PrivacyQuestion, privacy_plan
from outergrad.tools.plan.subject import subject
from outergrad.tools.plan.table import (
    about_dense,
    layer_tables,
    methods_table,
    why_equal_layers_differ,
)

WIDTH = 80
"""Columns of output that is not written to a terminal."""
COMPARED = "dense,dad,edad,og-powersgd:rank=4,rank-dad-1,rank-dad-4,rank-dad:rank=16"

Sites = Annotated[int, typer.Option(help="Number of sites.")]
LinkRate = Annotated[
    str,
    typer.Option(
        "--link", help="What a site can send, and as much receive: 10mbit, 1gbit, none (no limit)."
    ),
]
Latency = Annotated[
    str,
    typer.Option("--latency", "--rtt", help="Latency there and back, as 40ms."),
]
Transport = Annotated[
    str,
    typer.Option(
        help="How the sites reach each other: torch (torch.distributed), star (all through a hub), "
        "or module:factory, a function of your own that is given the number of sites and returns "
        "an outergrad.core.cost.CostModel."
    ),
]
HubRate = Annotated[
    str | None,
    typer.Option(
        "--hub-link",
        help="What the hub's own line carries each way, for all sites together.",
        show_default="no limit",
    ),
]
Methods = Annotated[str, typer.Option(help=f"With commas, of: {METHOD_HELP}.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="PyTorch's.", show_default="as PyTorch chooses")
]
Seconds = Annotated[
    float,
    typer.Option(
        help="Repeat the steps until it is clear which method is the fastest, but begin no further "
        "round after so long."
    ),
]
PerLayer = Annotated[bool, typer.Option("--layers", help="Show what every layer sends, too.")]
Epsilon = Annotated[
    float | None,
    typer.Option(
        help="Plan differential privacy, too: the noise with which whoever gets the model has this "
        "ε. With --delta, --epochs and --samples.",
        show_default="no noise",
    ),
]
Delta = Annotated[float | None, typer.Option(help="δ of --epsilon, as 1e-5.", show_default="none")]
Epochs = Annotated[
    float | None, typer.Option(help="Epochs of the training, for --epsilon.", show_default="none")
]
Samples = Annotated[
    int | None, typer.Option(help="Rows of data of each site, for --epsilon.", show_default="none")
]
Bands = Annotated[
    int | None,
    typer.Option(
        help="Noise in so many bands for --epsilon, as og.Private(bands=...).", show_default="1"
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="File that gets all of it.", dir_okay=False)
]


def plan(
    model: Model = "mlp",
    rows: Rows = None,
    sites: Sites = Question.sites,
    link: LinkRate = "100mbit",
    latency: Latency = "0ms",
    transport: Transport = "torch",
    hub_link: HubRate = None,
    methods: Methods = COMPARED,
    threads: Threads = None,
    seconds: Seconds = Question.seconds,
    layers: PerLayer = False,
    epsilon: Epsilon = None,
    delta: Delta = None,
    epochs: Epochs = None,
    samples: Samples = None,
    bands: Bands = None,
    json_file: JsonFile = None,
) -> None:
    """Predict what each method would send and how long a step would take, on this machine alone.

    Some steps run here, and all other sites are assumed to do the same. Bytes are exact; seconds
    assume that each site has its own machine like this one.
    """
    with errors_in_one_line():
        about = {"epsilon": epsilon, "delta": delta, "epochs": epochs, "samples": samples}
        private = PrivacyQuestion.of(**about, bands=bands)
        question = Question(
            model=model,
            rows=rows,
            sites=sites,
            link=parse_link(link, latency),
            transport=transport,
            hub_bit_per_s=None if hub_link is None else parse_rate(hub_link, "--hub-link"),
            methods=tuple(map(str.strip, methods.split(","))),
            seconds=seconds,
        )
        if private is not None:  # before seconds are spent on a forecast
            private.check_rows(subject(model, None).rows if rows is None else rows)
        if threads is not None:
            torch.set_num_threads(threads)
        found = _watched(question)
        show(found, layers=layers)
        told = found.as_dict()
        if private is not None:
            planned = privacy_plan(private, rows=found.subject.rows, sites=sites)
            show_privacy(planned)
            told["privacy"] = planned.as_dict()
        if json_file is not None:
            _save(told, json_file)


def _watched(question: Question) -> Forecast:
    with step_bars(shown=True) as bars:
        task = bars.add_task(question.model, total=None)  # it ends when enough is known
        return forecast(
            question,
            lambda done: bars.update(task, advance=1, description=f"{question.model}: {done}"),
        )


def show(found: Forecast, *, layers: bool = False) -> None:
    """Prints a forecast: its sentences and its tables."""
    console = _console()
    for sentence in [*found.verdict, *about_dense(found)]:
        console.print(sentence, highlight=False)
    console.print(methods_table(found))
    if not layers:
        return
    for table in layer_tables(found, console):
        console.print(table)
    console.print(why_equal_layers_differ(found), highlight=False)


def show_privacy(planned: PrivacyPlan) -> None:
    """Prints the noise that an ε takes, and what it means to each observer."""
    console = _console()
    console.print(planned.sentence, highlight=False)
    console.print(planned.table)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def _save(told: dict[str, Any], path: Path) -> None:
    try:
        write_whole(path, json.dumps(told, indent=1) + "\n")
    except OSError as error:
        raise RecipeError(f"--json {path}: {error.strerror}") from error
