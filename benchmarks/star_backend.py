"""A step of PyTorch's DDP over the star beside one over gloo, on the same shaped link.

    python benchmarks/star_backend.py                          # the MLP, 100 Mbit/s, two sites
    python benchmarks/star_backend.py --sites 4 --latency 40ms
    python benchmarks/star_backend.py --blind                  # a hub that must not read

Every site is a process with a network namespace of its own, and so is the hub, whose line has the
rate of all sites together, as that of a machine in a data centre would. Two groups train by turns:
that of the star, and one of gloo, whose sites reach each other directly. A figure is the median
over rounds, and of the ratios within a round. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

from outergrad.launch.links import Place, parse_link, places
from outergrad.launch.processes import run_processes
from outergrad_lab.bench.hub import PORT, run_hub, say_done, widen

WARMUP = 3
BACKENDS = ("gloo", "outergrad")


@dataclass(frozen=True)
class Asked:
    """Settings of one measurement."""

    workload: str
    rounds: int
    steps: int
    blind: bool


def train(asked: Asked, folder: Path, sites: int, rank: int, place: Place) -> list[list[float]]:
    """One site: seconds of a step in each round, by backend."""
    place.enter()
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    import outergrad.star.backend  # noqa: F401  # registers it
    from outergrad_lab.bench.hub import star_at
    from outergrad_lab.workloads import WORKLOADS

    torch.set_num_threads(1)
    star_at(folder, rank)  # waits until the hub listens
    address = f"star://{folder}/{rank}.kit?hub=10.77.0.{sites + 1}:{PORT}&blind={asked.blind:d}"
    dist.init_process_group("outergrad", init_method=address)
    groups = {"outergrad": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    workload = WORKLOADS[asked.workload]
    torch.manual_seed(0)
    models = {
        name: DistributedDataParallel(workload.build(), process_group=group)
        for name, group in groups.items()
    }
    form, rows = workload.format, workload.batch_size
    inputs = torch.randn(rows, *form.shape)
    if form.tokens:
        inputs = torch.randint(0, form.vocabulary or form.classes, (rows, *form.shape))
    targets = torch.randint(0, form.classes, (rows, *form.label_shape))
    found: list[list[float]] = [[] for _ in BACKENDS]
    for turn in range(asked.rounds + 1):
        for took, name in zip(found, BACKENDS, strict=True):
            dist.barrier()
            began = perf_counter()
            for _ in range(asked.steps if turn else WARMUP):
                cross_entropy(models[name](inputs), targets).backward()
            if turn:
                took.append((perf_counter() - began) / asked.steps)
    dist.barrier()
    dist.destroy_process_group()
    say_done(folder, rank)
    return found


def main() -> None:
    """Prints a step of each, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="mlp")
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--latency", default="0ms")
    parser.add_argument("--hub-link", help="of the hub; that of all sites together if not given")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--blind", action="store_true", help="the hub must not read")
    given = parser.parse_args()
    link = parse_link(given.link, given.latency)
    whole = given.hub_link or f"{given.sites * (link.rate_bit_per_s or 0) / 1e6:.0f}mbit"
    asked = Asked(given.workload, given.rounds, given.steps, given.blind)
    with (
        places(given.sites + 1, link) as (*sites, hub),
        tempfile.TemporaryDirectory(prefix="outergrad-") as name,
    ):
        folder = Path(name)
        widen(hub, link, whole)
        works = [
            partial(train, asked, folder, given.sites, rank, place)
            for rank, place in enumerate(sites)
        ]
        *found, _ = run_processes([*works, partial(run_hub, folder, hub, given.sites)])
    # A step is over when the slowest site has made it.
    gloo, star = (
        [max(times) for times in zip(*one, strict=True)] for one in zip(*found, strict=True)
    )
    ratio = median(s / g for s, g in zip(star, gloo, strict=True))
    print(f"{given.workload}, {given.sites} sites, {given.link}, {given.latency}: ", end="")
    print(f"gloo {1e3 * median(gloo):.0f} ms, star {1e3 * median(star):.0f} ms, x gloo {ratio:.2f}")


if __name__ == "__main__":
    main()
