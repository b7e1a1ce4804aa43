"""Seconds of an exchange with neighbours, and of one of all sites, where one link is slow.

    python benchmarks/gossip_links.py --rate 20mbit --slow 2mbit

Eight sites, each a process with a network of its own (Linux, root, iproute2), make fifteen steps of
20 ms between two exchanges of 0.4 MB of weights. A step is a pause, since the sites share this
machine's processors. Lines are equal; or what the sites 3 and 4 send each other is slow. Prints
seconds per exchange, steps included, of the site that took longest, and the megabytes that a site
sends per exchange.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import outergrad as og
from outergrad.launch.links import Place, parse_link, places
from outergrad.launch.namespaces import INTERFACE

SITES, EVERY, STEP_S, EXCHANGES = 8, 15, 0.02, 6
SLOW = 3, 4
METHODS = {
    "`og.LocalSteps(15)`": lambda path: og.LocalSteps(EVERY),
    "`og.LocalSteps(15, overlap=14)`": lambda path: og.LocalSteps(EVERY, overlap=EVERY - 1),
    "`og.Gossip`, ring": lambda path: og.Gossip("ring", every=EVERY),
    "the same, `overlap=15`": lambda path: og.Gossip("ring", every=EVERY, overlap=EVERY),
    "`og.Gossip`, ring without 3 to 4": lambda path: og.Gossip(path, every=EVERY),
    "the same, `overlap=15`, without 3 to 4": lambda path: og.Gossip(
        path, every=EVERY, overlap=EVERY
    ),
}
CASES = ("equal", "3 to 4 slow")


def main() -> None:
    """Prints a table per case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", default="20mbit", help="of a site's line")
    parser.add_argument("--slow", default="2mbit", help="of the slow link")
    options = parser.parse_args()
    print("| links | method | s per exchange | MB |", "|---|---|---|---|", sep="\n")
    for case in CASES:
        for name, (seconds, size) in measured(case, options.rate, options.slow).items():
            print(f"| {case} | {name} | {seconds:.2f} | {size / 1e6:.2f} |", flush=True)


def measured(case: str, rate: str, slow: str) -> dict[str, tuple[float, float]]:
    """Returns seconds and bytes per exchange of the slowest site, by method."""
    spawn = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as name, places(SITES, parse_link(rate)) as found:
        path = Path(name) / "edges.txt"
        pairs = [(site, (site + 1) % SITES) for site in range(SITES)]
        path.write_text("".join(f"{i} {j}\n" for i, j in pairs if (i, j) != SLOW))
        slow_down(case, found, rate, slow)
        told = spawn.Queue()
        work = [partial(run_site, rank, place, path, told) for rank, place in enumerate(found)]
        processes = [spawn.Process(target=one) for one in work]
        for process in processes:
            process.start()
        results = [told.get(timeout=600) for _ in processes]
        for process in processes:
            process.join()
    return {
        method: (max(r[method][0] for r in results), max(r[method][1] for r in results))
        for method in METHODS
    }


def slow_down(case: str, found: Sequence[Place], rate: str, slow: str) -> None:
    """Makes what two sites send each other slow, by a class of its own for these packets."""
    if case == CASES[0]:
        return
    for site, other in (SLOW, SLOW[::-1]):
        tc = partial(_tc, found[site].namespace)
        tc("qdisc", "del", "root")
        tc("qdisc", "add", "root", "handle", "1:", "htb", "default", "10")
        for number, of in (("10", rate), ("20", slow)):
            about = "parent", "1:", "classid", f"1:{number}", "htb", "rate", of, "quantum", "1514"
            tc("class", "add", *about)
        to = "match", "ip", "dst", f"10.77.0.{other + 1}"
        tc("filter", "add", "parent", "1:", "protocol", "ip", "u32", *to, "flowid", "1:20")


def _tc(namespace: str | None, what: str, do: str, *more: str) -> None:
    command = ["tc", "-n", str(namespace), what, do, "dev", INTERFACE, *more]
    subprocess.run(command, check=True, capture_output=True)


def run_site(rank: int, place: Place, path: Path, told: Any) -> None:
    """Trains by each method in turn."""
    place.enter()
    torch.set_num_threads(1)
    where = f"file://{path.parent / 'store'}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=SITES)
    told.put({name: _timed(make(path)) for name, make in METHODS.items()})
    dist.barrier()
    dist.destroy_process_group()


def _timed(method: Any) -> tuple[float, float]:
    torch.manual_seed(0)
    model = nn.Linear(1000, 100, bias=False)
    session = og.distribute(model, method)
    optimizer = SGD(model.parameters(), lr=0.01)
    _exchange(model, optimizer)
    dist.barrier()
    began, before = time.monotonic(), session.stats().total_sent_bytes
    for _ in range(EXCHANGES):
        _exchange(model, optimizer)
    seconds = (time.monotonic() - began) / EXCHANGES
    sent = (session.stats().total_sent_bytes - before) / EXCHANGES
    dist.barrier()
    session.detach()
    return seconds, sent


def _exchange(model: nn.Module, optimizer: SGD) -> None:
    for _ in range(EVERY):
        optimizer.zero_grad()
        model(torch.ones(1, 1000)).square().mean().backward()
        time.sleep(STEP_S)
        optimizer.step()


if __name__ == "__main__":
    main()
