"""The time of a training step beside another checkout's and beside DDP's, all in turn.

    python benchmarks/beside.py ../before                      # the deep MLP, two sites
    python benchmarks/beside.py ../before --workload gpt --methods dad,rank-dad-4

Every method of every checkout is a pair of processes of its own, joined by gloo, which trains on
without a link while all others wait. A figure is the median over rounds of a step over the other's
of the same round, between two bounds that hold it with 95%. The first figure is this checkout's
step over DDP's, the second over the other checkout's; DDP beside itself tells the noise.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from ratios import Ratio

HERE = Path(__file__).resolve().parent.parent
METHODS = ("dense", "auto", "dad", "rank-dad-4")
WARMUP = 30


class Pair:
    """Two processes that train by one method of one checkout, so many steps when asked."""

    def __init__(self, checkout: Path, method: str, workload: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._sites = [
            subprocess.Popen(
                [sys.executable, __file__, "--train", method, "--workload", workload, str(rank)],
                env={
                    **os.environ,
                    "PYTHONPATH": str(checkout / "src"),
                    "OMP_NUM_THREADS": "1",
                    "TORCH_CPP_LOG_LEVEL": "ERROR",  # who ends first is told of at length
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]

    def steps(self, count: int) -> float:
        """Seconds of so many steps, of the site that took longer."""
        for site in self._sites:
            assert site.stdin is not None
            print(count, file=site.stdin, flush=True)
        told = [site.stdout.readline() for site in self._sites if site.stdout is not None]
        if not all(told):
            raise RuntimeError("a site ended: its error is above")
        return max(map(float, told))

    def end(self) -> None:
        """Both processes leave."""
        for site in self._sites:
            site.communicate("0\n")


def train(method: str, workload: str, rank: int) -> None:
    """One site: reads from standard input how many steps to make, and writes what they took."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    import outergrad as og
    from outergrad_lab.workloads import WORKLOADS

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(rank)
    recipe = WORKLOADS[workload]
    model = recipe.build()
    if method.startswith("ddp"):
        network: torch.nn.Module = DistributedDataParallel(model)
    else:
        settings: Mapping[str, og.Method] = {
            "dense": og.Dense(),
            "auto": og.Auto(),
            "dad": og.DAD(),
            "rank-dad-4": og.RankDAD(rank=4),
        }
        og.distribute(model, settings[method])
        network = model
    optimizer = torch.optim.SGD(network.parameters(), 1e-4)
    form, rows = recipe.format, recipe.batch_size
    x = torch.randn(rows, *form.shape)
    if form.tokens:
        x = torch.randint(0, form.vocabulary or form.classes, (rows, *form.shape))
    y = torch.randint(0, form.classes, (rows, *form.label_shape))
    while count := int(sys.stdin.readline() or 0):
        begun = perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            cross_entropy(network(x), y).backward()
            optimizer.step()
        print(perf_counter() - begun, flush=True)


def rounds(pairs: Sequence[Pair], count: int, steps: int) -> list[list[list[float]]]:
    """Seconds of each pair's step, `count` rounds; every second round goes the other way around."""
    found: list[list[list[float]]] = [[] for _ in pairs]
    for made in range(count):
        order = range(len(pairs)) if made % 2 == 0 else reversed(range(len(pairs)))
        for place in order:
            found[place].append([pairs[place].steps(steps) / steps])
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", nargs="?", type=Path, help="a checkout of another version")
    parser.add_argument("--workload", default="deep-mlp", help="of outergrad bench, or several")
    parser.add_argument("--methods", default=",".join(METHODS), help="some of these four")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    args = parser.parse_args()
    for workload in args.workload.split(","):
        compare(args.before, workload, args.methods.split(","), args.rounds, args.steps)


def compare(
    before: Path | None, workload: str, methods: Sequence[str], count: int, steps: int
) -> None:
    """Measures one workload, and prints a line per method."""
    trees = [HERE, *([before.resolve()] if before else [])]
    kinds = [(HERE, "ddp"), (HERE, "ddp-again"), *((t, m) for m in methods for t in trees)]
    pairs = []
    for checkout, method in kinds:  # one after the other: each measures its link as it begins
        pairs.append(Pair(checkout, method, workload))
        pairs[-1].steps(WARMUP)
    found = dict(zip(kinds, rounds(pairs, count, steps), strict=True))
    for pair in pairs:
        pair.end()
    ddp = found[HERE, "ddp"]
    print(f"{workload}: DDP {median(r[0] for r in ddp) * 1e3:.2f} ms")
    for method in ["ddp-again", *methods]:
        own = found[HERE, method]
        told = f"{method:12} {Ratio.between(own, ddp)} x DDP"
        if before is not None and method in methods:
            told += f"   {Ratio.between(own, found[trees[1], method])} x before"
        print(told, flush=True)


if __name__ == "__main__":
    if "--train" in sys.argv:
        _, _, method, _, workload, rank = sys.argv
        train(method, workload, int(rank))
    else:
        main()
