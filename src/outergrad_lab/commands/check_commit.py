"""``outergrad check-commit``."""

import multiprocessing
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from outergrad.launch.console import errors_in_one_line
from outergrad.launch.errors import RecipeError
from outergrad_lab.checking.exploring import Found, drawn, execute, explore, kinds, shrunk
from outergrad_lab.checking.protocols import PROTOCOLS

_BLOCK = 1000
ALL = ",".join(PROTOCOLS)

Executions = Annotated[int, typer.Option(help="How many of each protocol.")]
Seed = Annotated[int, typer.Option(help="Of the first execution; the others follow it.")]
Protocols = Annotated[str, typer.Option(help=f"With commas, of: {', '.join(PROTOCOLS)}.")]
Processes = Annotated[int, typer.Option(help="That share the work.")]
Trace = Annotated[
    bool, typer.Option("--trace", help="Print what happens in the execution of --seed, instead.")
]


def check_commit(
    executions: Executions = 10_000,
    seed: Seed = 0,
    protocol: Protocols = ALL,
    processes: Processes = 1,
    trace: Trace = False,
) -> None:
    """Check the protocols by which sites commit a step, in random executions of a model.

    Sites die, pause, lose connections or their store. The exit code is 1 if some execution breaks
    a promise of docs/faults.md; its seed and --trace show how.
    """
    with errors_in_one_line():
        names = [name.strip() for name in protocol.split(",")]
        for name in names:
            if name not in PROTOCOLS:
                raise RecipeError(f"no protocol {name!r}: there are {', '.join(PROTOCOLS)}")
        if trace:
            for name in names:
                _print_trace(name, seed)
            return
        found = {name: _explored(name, seed, executions, processes) for name in names}
        Console().print(_table(found))
        if any(one.wrong for one in found.values()):
            raise typer.Exit(1)


def _explored(name: str, seed: int, executions: int, processes: int) -> Found:
    ends = range(seed, seed + executions, _BLOCK)
    blocks = [(name, first, min(first + _BLOCK, seed + executions)) for first in ends]
    found = Found()
    for one in track(_results(blocks, processes), name, len(blocks), transient=True):
        found.merge(one)
    return found


def _results(blocks: list[tuple[str, int, int]], processes: int) -> Iterator[Found]:
    if processes == 1:
        yield from map(_explore_block, blocks)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(_explore_block, blocks)


def _explore_block(block: tuple[str, int, int]) -> Found:
    name, first, end = block
    return explore(PROTOCOLS[name], range(first, end))


def _table(found: dict[str, Found]) -> Table:
    heads = ("protocol", "executions", "lost a site", "said they differ", "broken promises")
    table = Table(*(Column(head, no_wrap=k == 0) for k, head in enumerate(heads)))
    for name, one in found.items():
        broken = (f"{n} x {kind} (seed {one.seeds[kind]})" for kind, n in one.wrong.items())
        counts = map(str, (one.executions, one.lost, one.doubted))
        table.add_row(name, *counts, "\n".join(broken) or "none")
    return table


def _print_trace(name: str, seed: int) -> None:
    """Prints the trace of a seed's trial, or of the simplest one that fails in the same way."""
    protocol = PROTOCOLS[name]
    trial = drawn(seed, protocol)
    wrong = sorted(kinds(execute(trial, protocol)[0]))
    if wrong:
        trial = shrunk(trial, protocol, wrong[0])
    verdict, lines = execute(trial, protocol, traced=True)
    print(f"{name}: {trial}", *lines, *verdict.wrong, sep="\n")
