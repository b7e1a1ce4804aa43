"""How long a program takes until its first model is distributed, beside `import torch` alone.

    python benchmarks/imports.py --rounds 11

Each run is a process of its own; the kinds take turns, so that a busy moment meets all. All find
the package compiled, as a user's second run does, even where PYTHONDONTWRITEBYTECODE is set.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

PROGRAMS = {
    "import torch": "import torch",
    "and torch.distributed's group": """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
dist.destroy_process_group()
""",
    "and og.distribute": """
import sys, torch, torch.distributed as dist
import outergrad as og
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
og.distribute(torch.nn.Linear(4, 4)).detach()
dist.destroy_process_group()
""",
}


def seconds(program: str, store: Path) -> float:
    """Of one process, from its start to its end."""
    store.unlink(missing_ok=True)
    compiled = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    begin = perf_counter()
    subprocess.run([sys.executable, "-c", program, str(store)], check=True, env=compiled)
    return perf_counter() - begin


def measured(rounds: int) -> dict[str, float]:
    """The median seconds of each program, after one round that only fills caches."""
    with TemporaryDirectory() as folder:
        store = Path(folder, "store")
        taken = [
            [seconds(program, store) for program in PROGRAMS.values()] for _ in range(rounds + 1)
        ]
    return dict(zip(PROGRAMS, map(median, zip(*taken[1:], strict=True)), strict=True))


def main() -> None:
    """Prints the seconds of each program, and how many times those of `import torch` they are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    taken = measured(parser.parse_args().rounds)
    for name, median_s in taken.items():
        print(f"{name:<30} {median_s:6.3f} s {median_s / taken['import torch']:6.2f} x")


if __name__ == "__main__":
    main()
