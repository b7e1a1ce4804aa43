"""How many instructions a training step takes, counted by valgrind: a figure without noise.

    python benchmarks/instructions.py                        # the deep MLP, two sites
    python benchmarks/instructions.py --beside ../before     # and of another checkout, with ratios

Two sites, threads of one process, train; all that the process executes in twenty steps, after
twenty-five others, is counted and divided by twenty. Where the clock's noise is a tenth of a step,
this tells a hundredth. It takes some ten minutes per method, since valgrind imports PyTorch, too.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

WARMUP, COUNTED = 25, 20
METHODS = ("dense", "dad", "rank-dad-4")
HERE = Path(__file__).resolve().parent.parent


def train(method: str, workload: str) -> None:
    """Runs under valgrind, which writes its counts whenever `getpgid` is called."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    import outergrad as og
    from outergrad.launch.simulate import Stop, simulate
    from outergrad_lab.workloads import WORKLOADS

    settings = {"dense": og.Dense(), "dad": og.DAD(), "rank-dad-4": og.RankDAD(rank=4)}[method]
    recipe = WORKLOADS[workload]
    torch.set_num_threads(1)

    def site(group: dist.ProcessGroup, stop: Stop) -> None:
        torch.manual_seed(group.rank())
        model, first = recipe.build(), group.rank() == 0
        session = og.distribute(model, settings, group=group)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        x = torch.randn(recipe.batch_size, *recipe.format.shape)
        y = torch.randint(0, recipe.format.classes, (recipe.batch_size,))
        for step in stop.checked(range(WARMUP + COUNTED + 1)):
            if first and step in (WARMUP, WARMUP + COUNTED):
                os.getpgid(0)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        session.detach()

    simulate(site, 2)


def counted(checkout: Path, method: str, workload: str) -> float:
    """Instructions of a step of both sites together, with the library of this checkout.

    Raises:
        RuntimeError: valgrind, or the training below it, did not end well.
    """
    environment = {"PYTHONPATH": str(checkout / "src"), "PYTHONHASHSEED": "0"}
    with TemporaryDirectory() as folder:
        valgrind = ["valgrind", "--tool=callgrind", "--dump-before=getpgid"]
        training = [sys.executable, __file__, "--workload", workload, "--train", method]
        ended = subprocess.run(
            [*valgrind, f"--callgrind-out-file={folder}/counts", *training],
            env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        counts = Path(folder, "counts.2")
        if ended.returncode or not counts.exists():
            raise RuntimeError(f"valgrind ended with {ended.returncode}: {ended.stderr[-2000:]}")
        total = re.search(r"^totals: (\d+)", counts.read_text(), re.MULTILINE)
        assert total is not None
        return int(total[1]) / COUNTED


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", default="deep-mlp", help="of outergrad bench, of pictures")
    parser.add_argument("--methods", default=",".join(METHODS), help="some of the three")
    parser.add_argument("--beside", type=Path, help="a checkout of another version")
    parser.add_argument("--train", metavar="METHOD", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.workload)
        return
    checkouts = [HERE, *([args.beside.resolve()] if args.beside else [])]
    for method in args.methods.split(","):
        count = partial(counted, method=method, workload=args.workload)
        with ThreadPoolExecutor() as threads:  # each waits for a process; counts do not mind
            here, *there = threads.map(count, checkouts)
        told = "".join(f", beside {n / 1e6:,.1f}: {here / n:.4f}" for n in there)
        print(f"{method:11} {here / 1e6:8,.1f} million instructions in a step{told}", flush=True)


if __name__ == "__main__":
    main()
