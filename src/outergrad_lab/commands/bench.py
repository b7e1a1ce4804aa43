"""``outergrad bench``."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outergrad.launch.console import errors_in_one_line
from outergrad.launch.errors import RecipeError
from outergrad.launch.links import ShapedLink, parse_link, what_is_missing
from outergrad.launch.processes import exit_on_signals
from outergrad.tools.commands.model_options import Model, Rows
from outergrad.tools.commands.options import DATA_DIR, DataDir
from outergrad_lab.bench.plan import COMPARED, Plan
from outergrad_lab.bench.report import Report, result_file
from outergrad_lab.bench.run import bench as run_bench
from outergrad_lab.bench.run import notes
from outergrad_lab.peers.named import METHOD_HELP
from outergrad_lab.training.job import OPTIMIZERS

LinkRates = Annotated[
    str,
    typer.Option(
        "--link",
        help="Rates of the link, with commas: 10mbit, 100mbit, 1gbit, none (unshaped), or "
        "loopback, which needs no root.",
        show_default="100mbit, or loopback without root or iproute2",
    ),
]
Latency = Annotated[
    str, typer.Option("--latency", "--rtt", help="Latency there and back, as 40ms.")
]
Methods = Annotated[
    str,
    typer.Option(help=f"With commas, of: {METHOD_HELP}.", show_default=", ".join(COMPARED)),
]
Sites = Annotated[int, typer.Option(help="Number of sites, each a process.")]
Steps = Annotated[int, typer.Option(help="Timed steps in a block.")]
Rounds = Annotated[int, typer.Option(help="Blocks of each method, in turns.")]
Warmup = Annotated[int, typer.Option(help="Untimed steps of each method before.")]
Seconds = Annotated[
    float | None,
    typer.Option(
        help="Longest time for one method on one link.", show_default="120, or 900 to a loss"
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        help=f"Of the training: {', '.join(OPTIMIZERS)}.", show_default="sgd, or adam to a loss"
    ),
]
Threads = Annotated[int, typer.Option(help="PyTorch's, at each site.")]
UntilLoss = Annotated[
    float | None,
    typer.Option(help="Train on real data to this test loss, and report time and bytes."),
]
MaxSteps = Annotated[int, typer.Option(help="Give up on the loss after so many steps.")]
CheckEvery = Annotated[int, typer.Option(help="Steps between two looks at the test loss.")]
CheckBytes = Annotated[
    bool,
    typer.Option("--check", help="Fail unless the sessions' own count of bytes is right."),
]
Out = Annotated[
    Path, typer.Option(help="Folder for the results, or their file, as mlp.json; a plot beside.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show the phases of a step, and tracebacks.")
]
RESULTS = Path()
USUAL = "100mbit"


def bench(
    model: Model = Plan.workload,
    rows: Rows = None,
    link: LinkRates = "",
    latency: Latency = "0ms",
    sites: Sites = Plan.sites,
    methods: Methods = "",
    steps: Steps = Plan.steps,
    rounds: Rounds = Plan.rounds,
    warmup: Warmup = Plan.warmup,
    seconds: Seconds = None,
    threads: Threads = Plan.threads,
    optimizer: Optimizer = None,
    until_loss: UntilLoss = None,
    max_steps: MaxSteps = Plan.max_steps,
    check_every: CheckEvery = Plan.check_every,
    check: CheckBytes = False,
    data_dir: DataDir = DATA_DIR,
    out: Out = RESULTS,
    verbose: Verbose = False,
) -> None:
    """Compare methods on this machine over links of your rate: time and bytes per step.

    As root, for shaped links: outergrad bench --model mlp --link 10mbit,100mbit
    """
    with errors_in_one_line(), signals_in_one_line():
        plan = Plan(
            workload=model,
            rows=rows,
            methods=tuple(map(str.strip, methods.split(","))) if methods else COMPARED,
            sites=sites,
            steps=steps,
            rounds=rounds,
            warmup=warmup,
            seconds=(900 if until_loss else Plan.seconds) if seconds is None else seconds,
            threads=threads,
            optimizer=optimizer,
            until_loss=until_loss,
            max_steps=max_steps,
            check_every=check_every,
            data_dir=data_dir,
        )
        if check and until_loss:
            raise RecipeError("--check compares bytes per step: leave out --until-loss")
        links = choose_links(link, latency, sites)
        report = Report(result_file(out, plan, links), checked=check, verbose=verbose)
        report.begin(notes(plan, links))
        command = ["outergrad", *sys.argv[1:]]
        results = run_bench(plan, links, command, report.link_done, verbose=verbose)
        report.end(results)


def choose_links(rates: str, latency: str, sites: int) -> list[ShapedLink]:
    """Parses the requested links; without any, chooses what this machine can do.

    Raises:
        RecipeError: A link cannot be parsed, or this machine cannot have it.
    """
    links = [parse_link(rate, latency) for rate in (rates or USUAL).split(",")]
    for link in links:
        missing = what_is_missing(link, sites)
        if missing and (rates or link.rtt_s):
            raise RecipeError(missing)
        if missing:
            print(f"outergrad: {missing}; going on unshaped", file=sys.stderr)
            return [parse_link("loopback")]
    return links


@contextmanager
def signals_in_one_line() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end this process as Ctrl-C does, with nothing left behind."""
    with exit_on_signals():
        try:
            yield
        except SystemExit as ended:
            console = Console(stderr=True)
            console.show_cursor()  # a bar hides it
            if console.is_terminal:
                console.line()
            console.out(f"outergrad: ended by {signal.Signals(int(ended.code or 0) - 128).name}")
            raise
