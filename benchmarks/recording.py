r"""What recording costs: steps with and without a recorder, in turns, at two local sites.

    python benchmarks/recording.py --workloads mlp,gpt --methods dense,dad,rank-dad-4

A block of `--block` steps without is followed by one with; the table shows the median over the
rounds of the share of time that the second takes more. There is no link in between: with one, a
step takes longer and recording does not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import outergrad as og
from outergrad.recipes.data import synthetic
from outergrad.recipes.launch import run_sites
from outergrad.recipes.methods import Distributed, attach_of
from outergrad.recipes.training import ADAM_EPS
from outergrad.recipes.workloads import WORKLOADS


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=["mlp", "gpt"])
    parser.add_argument(
        "--methods", type=lambda text: text.split(","), default=["dense", "dad", "rank-dad-4"]
    )
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--block", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=11)
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

    def seconds(self, steps: int) -> float:
        """Per step."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self._optimizer.zero_grad()
            cross_entropy(self._replica.model(self._x), self._y).backward()
            self._optimizer.step()
        dist.barrier()
        return (time.perf_counter() - began) / steps

    def close(self) -> None:
        """Ends the session."""
        self._replica.close()


def compare(options: argparse.Namespace, folder: Path) -> None:
    """What each site does; site 0 prints."""
    first = dist.get_rank() == 0
    if first:
        print("| workload | method | ms per step | with recorder | more |")
        print("|---|---|---|---|---|", flush=True)
    for workload in options.workloads:
        for method in options.methods:
            recorder = og.JSONL(folder / f"{workload}-{method}", every=options.every)
            without, with_one = Side(workload, method, None), Side(workload, method, recorder)
            for side in (without, with_one):
                side.seconds(options.every + 1)
            pairs = [
                (without.seconds(options.block), with_one.seconds(options.block))
                for _ in range(options.rounds)
            ]
            plain, recorded = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
            more = statistics.median(b / a - 1 for a, b in pairs)
            if first:
                row = f"| {workload} | {method} | {plain:.1f} | {recorded:.1f} | {more:+.1%} |"
                print(row, flush=True)
            without.close()
            with_one.close()


def main() -> None:
    """Starts the two sites."""
    with tempfile.TemporaryDirectory() as folder:
        run_sites(partial(compare, parse(), Path(folder)), 2)


if __name__ == "__main__":
    main()
