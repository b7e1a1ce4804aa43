r"""What the noise scale, duplicate directions and norms of samples cost, as shares of all steps.

    python benchmarks/by_sample.py --workloads mlp,gru,gpt --methods dad,rank-dad-4

Two local sites, a recorder with samples that hears of every tenth step and measures every layer
each time, unless a `--budget` is given (0.04 is the default of recorders). The clock runs in the
functions that make these figures alone, so that the shares do not drown in the noise of whole
steps, as `benchmarks/recording.py` would have it.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections import defaultdict
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from recording import Side

import outergrad as og
from outergrad._noise import RecentNoise
from outergrad.launch.start import run_sites
from outergrad.record.gauge import Overlaps, SampleNorms

_PARTS = {
    "noise scale": [(RecentNoise, "take"), (RecentNoise, "batches")],
    "duplicates": [(Overlaps, "add"), (Overlaps, "measured")],
    "samples": [(SampleNorms, "add"), (SampleNorms, "measured")],
}


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=["mlp", "gru"])
    parser.add_argument(
        "--methods", type=lambda text: text.split(","), default=["dad", "rank-dad-4"]
    )
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--budget", type=float, default=math.inf)
    return parser.parse_args()


def clocked(owner: type, name: str, spent_s: dict[str, float], part: str) -> None:
    """Adds up the seconds in a method."""
    plain = getattr(owner, name)

    @wraps(plain)
    def method(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return plain(*args, **kwargs)
        finally:
            spent_s[part] += time.perf_counter() - began

    setattr(owner, name, method)


def measure(options: argparse.Namespace, folder: Path) -> None:
    """What each site does; site 0 prints its own."""
    spent_s: dict[str, float] = defaultdict(float)
    for part, methods in _PARTS.items():
        for owner, name in methods:
            clocked(owner, name, spent_s, part)
    if dist.get_rank() == 0:
        print(f"| workload | method | ms per step | {' | '.join(_PARTS)} | together |")
        print("|---|---|---|---|---|---|---|", flush=True)
    for workload in options.workloads:
        for method in options.methods:
            recorder = og.JSONL(
                folder / f"{workload}-{method}",
                every=options.every,
                budget=options.budget,
                samples=True,
            )
            side = Side(workload, method, recorder)
            side.seconds(options.every + 1)
            spent_s.clear()
            step_s, _ = side.seconds(options.steps)
            shares = [spent_s[part] / (options.steps * step_s) for part in _PARTS]
            if dist.get_rank() == 0:
                told = " | ".join(f"{share:.2%}" for share in [*shares, sum(shares)])
                print(f"| {workload} | {method} | {1e3 * step_s:.1f} | {told} |", flush=True)
            side.close()


def main() -> None:
    """Starts the two sites."""
    with tempfile.TemporaryDirectory() as folder:
        run_sites(partial(measure, parse(), Path(folder)), 2)


if __name__ == "__main__":
    main()
