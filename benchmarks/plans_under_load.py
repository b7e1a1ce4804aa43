"""Verdicts of `outergrad plan` on an idle machine, and beside programs that keep it busy.

python benchmarks/plans_under_load.py --model mlp --link 100mbit --loads 0,2,4
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOAD = "import torch; torch.set_num_threads(1); a = torch.randn(700, 700)\nwhile True: a @ a"


def main() -> None:
    """Plans beside each number of other programs, and prints rows of a table."""
    args = arguments()
    print("| other programs | rounds | verdict | computing alone, ms |\n|---|---|---|---|")
    for count in map(int, args.loads.split(",")):
        with busy(count):
            found = planned(args)
        told = ". ".join(line.split(" ms a step")[0] for line in verdicts(found))
        low, high = (1e3 * bound for bound in found["alone_s"])
        print(f"| {count} | {found['rounds']} | {told} | {low:.1f}-{high:.1f} |", flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--loads", default="0,0,2,4", help="numbers of programs beside it")
    parser.add_argument("--seconds", default="30")
    parser.add_argument("--threads", default="1")
    return parser.parse_args()


def verdicts(found: dict[str, Any]) -> list[str]:
    """The sentences on the methods of each kind, up to the times."""
    return [line for line in found["verdict"] if line.startswith("Of the")]


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Runs so many other programs, each on one thread."""
    programs = [subprocess.Popen([sys.executable, "-c", LOAD]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def planned(args: argparse.Namespace) -> dict[str, Any]:
    """The JSON of a plan."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        words = [sys.executable, "-m", "outergrad", "plan", "--json", str(path)]
        for name in ("model", "link", "seconds", "threads"):
            words += [f"--{name}", getattr(args, name)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


if __name__ == "__main__":
    main()
