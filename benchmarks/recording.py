r"""What recording costs: steps with and without a recorder, in turns, at two local sites.

    python benchmarks/recording.py --workloads mlp,gpt --methods dense,dad,rank-dad-4

Blocks of `--block` steps with and without take turns. The table shows the median time of a step
without, and how much more the steps with a recorder take in sum: by the clock, and by what both
sites' processors work, which other programs disturb less. There is no link in between: with one,
a step takes longer and recording does not.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import outergrad as og
from outergrad.launch.start import run_sites
from outergrad.tools.named_methods.attach import Distributed, attach_of
from outergrad_lab.data import synthetic
from outergrad_lab.training.job import ADAM_EPS
from outergrad_lab.workloads import WORKLOADS


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=["mlp", "gpt"])
    parser.add_argument(
        "--methods", type=lambda text: text.split(","), default=["dense", "dad", "rank-dad-4"]
    )
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--block", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=31)
    return parser.parse_args()


class Side:
    """One of the two trainings that are compared; on a process group of its own."""

    def __init__(self, workload: str, method: str, recorder: og.JSONL | None) -> None:
        self._workload = WORKLOADS[workload]
        torch.manual_seed(0)
        attach = attach_of(method)
        assert isinstance(attach, Distributed)
        self._replica = replace(attach, recorder=recorder)(self._workload.build(), dist.new_group())
        params = self._replica.model.parameters()
        self._optimizer = torch.optim.Adam(params, lr=self._workload.lr, eps=ADAM_EPS)
        data = synthetic(self._workload.format, self._workload.batch_size, dist.get_rank())
        self._x, self._y = data.x_train, data.y_train

    def seconds(self, steps: int) -> tuple[float, float]:
        """Per step: by the clock, and of this site's processor."""
        dist.barrier()
        began, worked = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._optimizer.zero_grad()
            cross_entropy(self._replica.model(self._x), self._y).backward()
            self._optimizer.step()
        worked = time.process_time() - worked
        dist.barrier()
        return (time.perf_counter() - began) / steps, worked / steps

    def close(self) -> None:
        """Ends the session."""
        self._replica.close()


def compare(options: argparse.Namespace, folder: Path) -> None:
    """What each site does; site 0 prints."""
    first = dist.get_rank() == 0
    if first:
        print("| workload | method | ms per step | more time | more work |")
        print("|---|---|---|---|---|", flush=True)
    for workload in options.workloads:
        for method in options.methods:
            recorder = og.JSONL(folder / f"{workload}-{method}", every=options.every)
            without, with_one = Side(workload, method, None), Side(workload, method, recorder)
            for side in (without, with_one):
                side.seconds(options.every + 1)
            taken = {without: [], with_one: []}
            for number in range(options.rounds):
                for side in (without, with_one) if number % 2 else (with_one, without):
                    taken[side].append(side.seconds(options.block))
            plain, recorded = (torch.tensor(blocks) for blocks in taken.values())
            more = recorded.sum(0) / plain.sum(0) - 1
            dist.all_reduce(more)
            if first:
                ms, shares = 1e3 * plain[:, 0].median(), (more / dist.get_world_size()).tolist()
                row = f"| {workload} | {method} | {ms:.1f} | {shares[0]:+.1%} | {shares[1]:+.1%} |"
                print(row, flush=True)
            without.close()
            with_one.close()


def main() -> None:
    """Starts the two sites."""
    with tempfile.TemporaryDirectory() as folder:
        run_sites(partial(compare, parse(), Path(folder)), 2)


if __name__ == "__main__":
    main()
