"""Sums under masks beside sums that a hub reads: milliseconds per MiB at one site.

    python benchmarks/masked_sums.py --sites 8 --mebibytes 1,4

Sites and hub are threads of one process without a link. In each round all sites make one sum around
a hub that reads and one around a hub that must not. `site` is the time of the processor that a
site's own thread takes from the start of a sum to its end, `all` that of the whole process, with
all sites, both hubs and gRPC: medians over rounds, at the slowest site.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier

import torch

import outergrad as og
from outergrad.core.transport import Comm
from outergrad.star.folder import HubFolder
from outergrad.star.server import HubServer

CPU = torch.device("cpu")
FLOAT_BYTES, MEBIBYTE = 4, 1 << 20
USUAL, BLIND = "usual", "blind"


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--mebibytes", default="1,4", help="of a sum, several by commas")
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


@contextmanager
def opened(sites: int) -> Iterator[list[dict[str, Comm]]]:
    """The two ways of each site."""
    names = [f"site-{rank}" for rank in range(sites)]
    with ExitStack() as stack:
        folder = HubFolder(Path(stack.enter_context(TemporaryDirectory())))
        folder.create("localhost:8443", ["127.0.0.1"])
        kits = [folder.path / f"{name}.kit" for name in names]
        for name, kit in zip(names, kits, strict=True):
            folder.invite(name).write(kit)
        threads = stack.enter_context(ThreadPoolExecutor(sites))
        ways = {way: _around(folder, names, kits, way, stack, threads) for way in (USUAL, BLIND)}
        yield [{way: comms[rank] for way, comms in ways.items()} for rank in range(sites)]


def _around(
    folder: HubFolder,
    names: Sequence[str],
    kits: Sequence[Path],
    way: str,
    stack: ExitStack,
    threads: ThreadPoolExecutor,
) -> list[Comm]:
    server = HubServer(folder, "127.0.0.1:0", names)
    server.start()
    stack.callback(server.stop)
    hub = f"127.0.0.1:{server.port}"
    stars = [og.Star(hub, kit=kit, blind=way == BLIND) for kit in kits]
    for star in stars:
        stack.callback(star.close)
    return list(threads.map(lambda star: star.open(CPU), stars))


def measured(comms: Sequence[dict[str, Comm]], numbers: int, rounds: int) -> list[dict[str, float]]:
    """Seconds of each way: of the slowest site's thread, and of the process."""
    barrier = Barrier(len(comms))
    with ThreadPoolExecutor(len(comms)) as threads:
        found = list(threads.map(lambda ways: _at_one_site(ways, numbers, rounds, barrier), comms))
    return [{way: max(one[k][way] for one in found) for way in (USUAL, BLIND)} for k in range(2)]


def _at_one_site(
    ways: dict[str, Comm], numbers: int, rounds: int, barrier: Barrier
) -> list[dict[str, float]]:
    """Medians at one site, after a first round."""
    own = torch.randn(numbers)
    seconds = [
        {way: _one_sum(comm, own.clone(), barrier) for way, comm in ways.items()}
        for _ in range(rounds + 1)
    ]
    return [
        {way: statistics.median(one[way][k] for one in seconds[1:]) for way in ways}
        for k in range(2)
    ]


def _one_sum(comm: Comm, own: torch.Tensor, barrier: Barrier) -> tuple[float, float]:
    barrier.wait()
    before = time.thread_time(), time.process_time()
    comm.all_reduce(own).wait()
    site = time.thread_time() - before[0]
    barrier.wait()
    return site, time.process_time() - before[1]


def main() -> None:
    """Prints the table."""
    options = parse()
    torch.set_num_threads(1)
    print("| MiB | site: usual | masked | more | all: usual | masked | ratio |")
    print("|---" * 7 + "|")
    with opened(options.sites) as comms:
        for size in map(float, options.mebibytes.split(",")):
            site, process = measured(comms, int(size * MEBIBYTE) // FLOAT_BYTES, options.rounds)
            usual, masked = (1e3 * site[way] / size for way in (USUAL, BLIND))
            every = [1e3 * process[way] / size for way in (USUAL, BLIND)]
            cells = [usual, masked, masked - usual, *every]
            told = " | ".join(f"{ms:.1f}" for ms in cells)
            print(f"| {size:g} | {told} | {every[1] / every[0]:.2f} |")


if __name__ == "__main__":
    main()
