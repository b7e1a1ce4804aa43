"""A step around a hub, beside one over torch.distributed: milliseconds, over shaped links.

    python benchmarks/star.py --sites 4 --kilobytes 200 --links none,100mbit-40ms

Every site and the hub have a network of their own, joined as by `outergrad bench` (Linux, root,
iproute2). The line of the hub has the delay of the link, and `--hub-rate`. `gather` and `sum` are
bare collectives in which each site has so many kilobytes; `dad` and `dense` are steps of a small
model in which as much travels. The table shows the median over steps at the slowest site.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn

import outergrad as og
from outergrad.comm.process_group import TorchDistributed
from outergrad.core.transport import Comm, Transport
from outergrad.launch.links import Place, ShapedLink, parse_link, places
from outergrad.launch.processes import run_processes
from outergrad_lab.bench.hub import run_hub, say_done, star_at, widen

KINDS = ("gather", "sum", "dad", "dense")
CPU = torch.device("cpu")
_WIDTH = 128
_FLOAT_BYTES = 4


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--kilobytes", type=float, default=200.0)
    parser.add_argument("--links", type=_listed, default=["none", "100mbit-40ms"])
    parser.add_argument("--hub-rate", default="1gbit", help="of the hub's line, or none")
    parser.add_argument("--transports", type=_listed, default=["star", "torch"])
    parser.add_argument("--kinds", type=_listed, default=list(KINDS))
    parser.add_argument("--steps", type=int, default=30)
    return parser.parse_args()


def _listed(text: str) -> list[str]:
    return text.split(",")


def measure(options: argparse.Namespace) -> None:
    """Prints the table."""
    print("| link | transport |", " | ".join(options.kinds), "| the hub's memory, MB |")
    print("|---" * (3 + len(options.kinds)) + "|")
    for name in options.links:
        rate, _, rtt = name.partition("-")
        link = parse_link(rate, rtt or "0ms")
        for transport in options.transports:
            medians, memory = _measured(options, link, transport)
            cells = " | ".join(f"{m:.1f}" for m in medians)
            print(f"| {name} | {transport} | {cells} |", *(f"{mb:.0f} |" for mb in memory))


def _measured(
    options: argparse.Namespace, link: ShapedLink, transport: str
) -> tuple[list[float], list[float]]:
    """Milliseconds of each kind, and the most memory that the hub had, if there is one."""
    with TemporaryDirectory() as folder, places(options.sites + 1, link) as (*sites, hub):
        widen(hub, link, options.hub_rate)
        own = partial(run_site, options, transport, Path(folder))
        works = [partial(own, rank, place) for rank, place in enumerate(sites)]
        if transport == "star":
            works.append(partial(run_hub, Path(folder), hub, options.sites))
        found = run_processes(works)
    times = zip(*found[: options.sites], strict=True)
    return [1e3 * max(one) for one in times], [m for peak in found[options.sites :] for m in peak]


def run_site(
    options: argparse.Namespace, transport: str, folder: Path, rank: int, place: Place
) -> list[float]:
    """Seconds of each kind."""
    place.enter()
    torch.set_num_threads(1)
    way = star_at(folder, rank) if transport == "star" else _torch(folder, rank, options.sites)
    found = []
    for kind in options.kinds:
        with _stepping(kind, way, options) as step:
            found.append(_median(step, options.steps))
    say_done(folder, rank)
    return found


def _torch(folder: Path, rank: int, sites: int) -> Transport:
    where = (folder / "group").as_uri()
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=sites)
    return TorchDistributed()


def _median(step: Callable[[], object], steps: int) -> float:
    """After a few; the time between two ends of steps, which are the same on all sites."""
    for _ in range(min(5, steps)):
        step()
    ends = [time.perf_counter()]
    for _ in range(steps):
        step()
        ends.append(time.perf_counter())
    return statistics.median(b - a for a, b in pairwise(ends))


@contextmanager
def _stepping(
    kind: str, way: Transport, options: argparse.Namespace
) -> Iterator[Callable[[], object]]:
    """What makes one step, or one collective."""
    numbers = int(1000 * options.kilobytes / _FLOAT_BYTES)
    if kind in ("gather", "sum"):
        yield _collective(kind, way.open(CPU), torch.ones(numbers))
        return
    rows = numbers // (6 * _WIDTH)
    width = _WIDTH if kind == "dad" else round((numbers / 3) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
    method = og.DAD(always=True) if kind == "dad" else og.Dense()
    session = og.distribute(model, method, transport=way)
    yield _training(model, torch.randn(rows, width))
    session.detach()


def _collective(kind: str, comm: Comm, own: torch.Tensor) -> Callable[[], object]:
    if kind == "sum":
        return lambda: comm.all_reduce(own.clone()).wait()
    return lambda: comm.all_gather(own, [len(own)] * comm.world_size).wait()


def _training(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    measure(parse())
