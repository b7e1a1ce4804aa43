"""Time and bytes of a training step, compared between methods in one run.

    python benchmarks/step.py --model mlp --link 100mbit --methods alone,ddp,dad

Every site holds the models of all methods and trains them in turn, block by block, so that
a machine that slows down slows all of them. See README.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import links
import options as common
import sites


@dataclass
class Tally:
    """What one site measured of one method.

    Attributes:
        block_s: The seconds of each timed step, block by block.
        sent_bytes: Sent in all of them.
    """

    block_s: list[list[float]] = field(default_factory=list)
    sent_bytes: int = 0


def main() -> None:
    """Runs as one of the sites, or starts them and prints their table."""
    options = parse()
    if sites.is_site():
        print(json.dumps(run_site(options)))
        return
    with links.places(options.sites, options.link, netns=options.netns) as places:
        results = sites.run(sys.argv, places, options.threads)
    rows = summarise(results, options.methods)
    print_table(rows)
    common.save(options, rows)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--link", default="none", choices=["none", *links.RATES_BIT_PER_S])
    parser.add_argument("--netns", action="store_true", help="namespaces for --link none too")
    parser.add_argument("--steps", type=int, default=10, help="timed steps in a block")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before them")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each method")
    parser.add_argument(
        "--rebuild", action="store_true", help="hold one model at a time: slower, less memory"
    )
    return parser.parse_args()


def run_site(options: argparse.Namespace) -> dict[str, Any]:
    """Measures every method on this site, in blocks that take turns."""
    with sites.group(options.timeout) as (rank, world_size):
        trainers = Trainers(options.model, rank, keep=not options.rebuild)
        sent_bytes = byte_counter(world_size)
        tallies = {method: Tally() for method in options.methods}
        for title, method in schedule(options.methods, options.rounds):
            if rank == 0:
                sites.progress(title)
            measure_block(trainers.get(method), tallies[method], options, sent_bytes)
    sites.progress("")
    return {method: vars(tally) for method, tally in tallies.items()}


def schedule(methods: list[str], rounds: int) -> Iterator[tuple[str, str]]:
    """Yields the blocks in order, each as a line of progress and its method."""
    began = time.perf_counter()
    for done in range(rounds * len(methods)):
        turn, method = done // len(methods), methods[done % len(methods)]
        yield f"{time.perf_counter() - began:6.0f} s  round {turn + 1}/{rounds}: {method}", method


class Trainers:
    """One training step per method, each with a model and an optimizer of its own."""

    def __init__(self, task: str, rank: int, *, keep: bool) -> None:
        """Prepares to build them when first asked for; ``keep`` holds on to all of them."""
        self.task, self.rank, self.keep = task, rank, keep
        self.built: dict[str, Callable[[], None]] = {}

    def get(self, method: str) -> Callable[[], None]:
        """Returns the step of one method."""
        from trainer import trainer

        if method not in self.built:
            if not self.keep:
                self.built.clear()
                gc.collect()
            self.built[method] = trainer(self.task, method, self.rank)
        return self.built[method]


def measure_block(
    step: Callable[[], None],
    tally: Tally,
    options: argparse.Namespace,
    sent_bytes: Callable[[], float],
) -> None:
    """Trains a few untimed and then the timed steps of one method."""
    import torch.distributed as dist

    for _ in range(options.warmup):
        step()
    dist.barrier()
    before = sent_bytes()
    tally.block_s.append([seconds(step) for _ in range(options.steps)])
    dist.barrier()  # this site's last bytes may still wait in its queue
    tally.sent_bytes += int(sent_bytes() - before)


def seconds(step: Callable[[], None]) -> float:
    """Takes one step and returns how long it was."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def byte_counter(world_size: int) -> Callable[[], float]:
    """Returns a reader of the bytes that this site's interface has sent, headers included.

    On loopback the sites share one interface, and each is given an equal part.
    """
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    counter = Path("/sys/class/net", interface, "statistics/tx_bytes")
    sharers = world_size if interface == "lo" else 1
    return lambda: int(counter.read_text()) / sharers


def summarise(results: list[dict[str, Any]], methods: list[str]) -> list[dict[str, Any]]:
    """Makes one row per method: rank 0's times, the mean over sites of the bytes sent."""
    return [summary(method, [result[method] for result in results]) for method in methods]


def summary(method: str, tallies: list[dict[str, Any]]) -> dict[str, Any]:
    """Makes the row of one method from what each site measured of it."""
    blocks_ms = [[1e3 * s for s in block] for block in tallies[0]["block_s"]]
    step_ms = [ms for block in blocks_ms for ms in block]
    return {
        "method": method,
        "blocks_ms": blocks_ms,
        "median_ms": statistics.median(step_ms),
        "quartiles_ms": statistics.quantiles(step_ms, method="inclusive")[::2],
        "bytes_per_step": statistics.mean(t["sent_bytes"] for t in tallies) / len(step_ms),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints one line per method, with ratios to DDP's."""
    print(f"{'method':<16}{'ms/step':>10}  {'[quartiles]':<20}{'/ddp':>8}{'bytes':>14}{'/ddp':>8}")
    for row in rows:
        low, high = row["quartiles_ms"]
        print(
            f"{row['method']:<16}{row['median_ms']:>10.2f}  "
            f"{f'[{low:.2f}, {high:.2f}]':<20}{time_ratio(row, rows):>8}"
            f"{row['bytes_per_step']:>14,.0f}{common.ratio(row, rows, 'bytes_per_step'):>8}"
        )


def time_ratio(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Writes the median over rounds of the step time as a multiple of DDP's in that round.

    What slows the machine for longer than a block then falls on both.
    """
    ddp = next((other["blocks_ms"] for other in rows if other["method"] == "ddp"), None)
    if ddp is None:
        return "-"
    blocks = zip(row["blocks_ms"], ddp, strict=True)
    ratios = [statistics.median(ours) / statistics.median(theirs) for ours, theirs in blocks]
    return f"{statistics.median(ratios):.4f}"


if __name__ == "__main__":
    main()
