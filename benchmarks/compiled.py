r"""What torch.compile gains: steps of the same training in turns, at two local sites.

    python benchmarks/compiled.py --workloads mlp,gpt --methods dense,dad,rank-dad-4

Blocks of `--block` steps take turns: the compiled model alone (nothing is shared), outergrad
uncompiled, outergrad compiled with its graphs broken at every layer with a rule, and outergrad
compiled with `fullgraph=True`. The table shows the median time of a step uncompiled, and the median
over the rounds of the others' time to it: what ran next to each other is compared. There is no link
in between: with one, a step takes longer and compiling gains the same.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from outergrad.launch.start import run_sites
from outergrad.tools.named_methods.attach import Distributed, attach_of
from outergrad_lab.data import synthetic
from outergrad_lab.training.job import ADAM_EPS
from outergrad_lab.workloads import WORKLOADS

WAYS = ("uncompiled", "alone", "broken", "fullgraph")


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=["mlp", "gpt"])
    parser.add_argument(
        "--methods", type=lambda text: text.split(","), default=["dense", "dad", "rank-dad-4"]
    )
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=21)
    return parser.parse_args()


class Side:
    """One of the trainings that are compared; on a process group of its own."""

    def __init__(self, workload: str, method: str, way: str) -> None:
        self._workload = WORKLOADS[workload]
        torch.manual_seed(0)
        attach = attach_of("alone" if way == "alone" else method)
        self._replica = attach(self._workload.build(), dist.new_group())
        self._model = model = self._replica.model
        if way == "broken":
            _break_graphs(model)
        if way != "uncompiled":
            self._model = torch.compile(model, fullgraph=way != "broken")
        self._optimizer = torch.optim.Adam(model.parameters(), lr=self._workload.lr, eps=ADAM_EPS)
        data = synthetic(self._workload.format, self._workload.batch_size, dist.get_rank())
        self._x, self._y = data.x_train, data.y_train

    def seconds(self, steps: int) -> float:
        """Per step, by the clock."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self._optimizer.zero_grad()
            cross_entropy(self._model(self._x), self._y).backward()
            self._optimizer.step()
        dist.barrier()
        return (time.perf_counter() - began) / steps

    def close(self) -> None:
        """Ends the session."""
        self._replica.close()


def _break_graphs(model: nn.Module) -> None:
    """As if no layer with a rule could be traced."""
    for module in model.modules():
        own = type(module)  # a session has given each of its layers a class of its own
        if own.__base__ in (nn.Linear, nn.Embedding, nn.Conv2d):
            own.forward = torch.compiler.disable(own.forward)


def compare(options: argparse.Namespace) -> None:
    """What each site does; site 0 prints."""
    first = dist.get_rank() == 0
    if first:
        print("| workload | method | ms uncompiled | " + " | ".join(WAYS[1:]) + " |")
        print("|---" * (3 + len(WAYS[1:])) + "|", flush=True)
    for workload in options.workloads:
        for method in options.methods:
            row = _row(workload, method, options)
            if first:
                print(f"| {workload} | {method} | {row} |", flush=True)


def _row(workload: str, method: str, options: argparse.Namespace) -> str:
    sides = {way: Side(workload, method, way) for way in _ways(method)}
    for side in sides.values():
        side.seconds(5)  # the second plan, and what is compiled for it
    taken: dict[str, list[float]] = {way: [] for way in sides}
    for number in range(options.rounds):
        for way in list(sides) if number % 2 else reversed(sides):
            taken[way].append(sides[way].seconds(options.block))
    for side in sides.values():
        side.close()
    seconds = {way: torch.tensor(blocks) for way, blocks in taken.items()}
    plain = seconds["uncompiled"]
    ratios = [
        f"{(seconds[way] / plain).median().item():.2f}" if way in seconds else "-"
        for way in WAYS[1:]
    ]
    return " | ".join([f"{1e3 * plain.median().item():.1f}", *ratios])


def _ways(method: str) -> list[str]:
    """Without taps there is nothing that could break a graph."""
    assert isinstance(attach_of(method), Distributed)
    return [way for way in WAYS if way != "broken" or method != "dense"]


def main() -> None:
    """Starts the two sites."""
    options = parse()
    run_sites(_Compare(options), 2)


class _Compare:
    """`compare` with its options, which processes can be handed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def __call__(self) -> None:
        compare(self._options)


if __name__ == "__main__":
    main()
