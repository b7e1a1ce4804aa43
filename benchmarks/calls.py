"""How many functions of Python a backward calls, counted: a figure without noise.

    python benchmarks/calls.py              # the deep MLP, by each of METHODS
    python benchmarks/calls.py --by-name    # and which functions of outergrad these are
    python benchmarks/calls.py --lines      # and how many different lines of outergrad a step has

Two sites, threads of one process, make the same steps until these are alike; then the calls of
twenty backward passes of one site are counted, and divided by twenty.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import outergrad as og
from outergrad.launch.simulate import Stop, simulate
from outergrad_lab.workloads import WORKLOADS

FEW_BITS = og.RankDAD(
    budget=1 / 64, wire=og.wire.Int4(), vectors=og.wire.Int4(), error_feedback="auto"
)
METHODS = {
    "dense": og.Dense(),
    "dad": og.DAD(),
    "rank-dad-4": og.RankDAD(rank=4),
    "budget": FEW_BITS,
    "budget, shared out in every step": replace(FEW_BITS, share_every=1),
}
WARMUP, COUNTED = 40, 20
PACKAGE = Path(og.__file__).parent


Lines = set[tuple[str, int]]


def counted(method: Any, workload: str, lines: Lines | None = None) -> Counter[str]:
    """Calls by function in all counted steps of the first site.

    Args:
        method: how gradients travel.
        workload: of outergrad bench.
        lines: takes the lines that one step more executes, from `zero_grad` to the optimizer's
            step; None to make no such step.
    """

    def site(group: dist.ProcessGroup, stop: Stop) -> Counter[str]:
        recipe, calls = WORKLOADS[workload], Counter[str]()
        model, count = recipe.build(), group.rank() == 0
        session = og.distribute(model, method, group=group)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        x = torch.randn(recipe.batch_size, *recipe.format.shape)
        y = torch.randint(0, recipe.format.classes, (recipe.batch_size,))
        for step in stop.checked(range(WARMUP + COUNTED)):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            sys.setprofile(counter(calls) if count and step >= WARMUP else None)
            loss.backward()
            sys.setprofile(None)
            optimizer.step()
        if lines is not None:
            sys.settrace(liner(lines) if count else None)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            sys.settrace(None)
        session.detach()
        return calls

    return simulate(site, 2)[0]


def counter(calls: Counter[str]) -> Any:
    """A profile function of this thread."""

    def on_event(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls[name(frame)] += 1

    return on_event


def liner(lines: Lines) -> Any:
    """A trace function of this thread."""

    def on_line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return on_line

    def on_call(frame: FrameType, event: str, _: object) -> Any:
        return on_line if Path(frame.f_code.co_filename).is_relative_to(PACKAGE) else None

    return on_call


def name(frame: FrameType) -> str:
    """File and function, if it is outergrad's."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return "others"
    return f"{path.relative_to(PACKAGE)}: {frame.f_code.co_name}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", default="deep-mlp", help="of outergrad bench")
    parser.add_argument("--by-name", action="store_true", help="the thirty most frequent")
    parser.add_argument("--lines", action="store_true", help="count lines, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for method, settings in METHODS.items():
        lines: Lines | None = set() if args.lines else None
        calls = counted(settings, args.workload, lines)
        whole, own = calls.total(), calls.total() - calls["others"]
        told = "" if lines is None else f", {len(lines):,} lines of outergrad in a step"
        print(f"{method:32} {whole / COUNTED:8,.0f}, of outergrad {own / COUNTED:,.0f}{told}")
        for which, times in calls.most_common(30) if args.by_name else ():
            print(f"{times / COUNTED:8,.1f}  {which}")


if __name__ == "__main__":
    main()
