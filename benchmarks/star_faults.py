"""How soon a star sees a killed site and a silent line, and is back behind a cut: seconds.

    python benchmarks/star_faults.py --rounds 5
    python benchmarks/star_faults.py --injections 100 --seed 1 --method dad

Two sites and a hub, each with a network of its own (Linux, root, iproute2). `killed`: the process
of the second site is killed. `silent`: its cable carries nothing any more. Both are timed until the
first site, which waits for it, has its error. `cut`: its connection to the hub is shut down; timed
until the next exchange is over.

`--injections` has four sites train that go on without those that are lost, hits them at random, and
judges (`star_injections.py`): no hang, replicas alike to the bit, in every step the same sites in
the words of all sites and of the hub's log, at most one step void for each site that is lost, and
nobody lost where a line is cut or a site stands still for less than the hub's grace.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from star import CPU
from star_injections import METHODS, inject, shut_connections

import outergrad as og
from outergrad.core.errors import ExchangeError
from outergrad.core.transport import Comm
from outergrad.launch.links import Place, parse_link, places
from outergrad.launch.namespaces import INTERFACE
from outergrad_lab.bench.hub import run_hub

FAULTS = ("killed", "silent", "cut")
_SETTLES_S = 0.5
_SITES = 2


def measure(rounds: int) -> None:
    """Prints the table."""
    print("| fault | median s | longest s |", "|---|---|---|", sep="\n")
    for fault in FAULTS:
        found = [_seconds(fault) for _ in range(rounds)]
        print(f"| {fault} | {statistics.median(found):.3f} | {max(found):.3f} |")


def _seconds(fault: str) -> float:
    """Of one run."""
    with TemporaryDirectory() as name, places(_SITES + 1, parse_link("none")) as (*sites, hub):
        folder = Path(name)
        works = [partial(run_hub, folder, hub, _SITES)]
        works += [partial(run_site, folder, rank, place, fault) for rank, place in enumerate(sites)]
        processes = _started(works)
        try:
            return float(_read(folder / "found"))
        finally:
            for process in processes:
                process.kill()
                process.join()


def _started(works: list[Callable[[], object]]) -> list[BaseProcess]:
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=work, daemon=True) for work in works]
    for process in processes:
        process.start()
    return list(processes)


def run_site(folder: Path, rank: int, place: Place, fault: str) -> None:
    """The second site has the fault, the first one sees it."""
    place.enter()
    _read(folder / "listening")
    comm = og.Star(kit=folder / f"{rank}.kit").open(CPU)
    for _ in range(3):
        _gather(comm)
    time.sleep(_SETTLES_S)
    if rank == 1:
        _write(folder / "began", str(time.monotonic()))
        _have(fault, place)
    began = float(_read(folder / "began"))
    try:
        _gather(comm)
    except ExchangeError:
        assert fault != "cut"
    else:
        assert fault == "cut"
    if rank == 0:
        _write(folder / "found", str(time.monotonic() - began))


def _have(fault: str, place: Place) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "silent":
        down = ["ip", "-n", str(place.namespace), "link", "set", INTERFACE, "down"]
        subprocess.run(down, check=True)
        time.sleep(60)
    else:
        shut_connections()


def _gather(comm: Comm) -> None:
    comm.all_gather(torch.ones(2), [2] * comm.world_size).wait()


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.rename(path)


def _read(path: Path) -> str:
    """Waits until it is there."""
    until = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path.name} does not come")
        time.sleep(0.002)
    return path.read_text()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--injections", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--method", choices=METHODS, default="dad")
    chosen = parser.parse_args()
    if chosen.injections:
        sys.exit(not inject(chosen.injections, chosen.seed, chosen.method))
    measure(chosen.rounds)
