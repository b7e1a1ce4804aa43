"""Verdicts of `outergrad plan` on an idle machine, and beside programs that keep it busy.

python benchmarks/plans_under_load.py --model mlp --link 100mbit --loads 0,0,2,4
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

KINDS = ("exact", "approximate")
LOAD = "import torch; torch.set_num_threads(1); a = torch.randn(700, 700)\nwhile True: a @ a"


def main() -> None:
    """Plans beside each number of other programs, prints rows of a table, and compares them."""
    args, plans = arguments(), []
    print("| other programs | computing alone, ms | rounds | exact | approximate |")
    print("|---|---|---|---|---|")
    for count in map(int, args.loads.split(",")):
        with busy(count):
            plans.append(planned(args))
        print(row(count, plans[-1]), flush=True)
    denied = [
        kind
        for kind in KINDS
        if any(denies(one, other, kind) for one, other in combinations(plans, 2))
    ]
    print(f"\nContradictions: {', '.join(denied) or 'none'}.")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--loads", default="0,0,2,4", help="numbers of programs beside it")
    parser.add_argument("--seconds", default="30")
    parser.add_argument("--threads", default="1")
    return parser.parse_args()


def row(count: int, found: dict[str, Any]) -> str:
    """A row of the table."""
    low, high = (1e3 * bound for bound in found["alone_s"])
    told = " | ".join(said(found["fastest"][kind]) for kind in KINDS)
    return f"| {count} | {low:.1f}-{high:.1f} | {found['rounds']} | {told} |"


def said(verdict: dict[str, Any]) -> str:
    """The fastest methods of a kind, if that can be told, and their relation to dense."""
    *names, last = verdict["methods"]
    joint = " and " if verdict["told"] else " or "
    return f"{joint.join(filter(None, [', '.join(names), last]))}: {verdict['beside_dense']}"


def denies(one: dict[str, Any], other: dict[str, Any], kind: str) -> bool:
    """True if a plan says of the methods of a kind what another one denies."""
    first, second = one["fastest"][kind], other["fastest"][kind]
    named = [set(verdict["methods"]) for verdict in (first, second)]
    if first["told"] and second["told"] and named[0] != named[1]:
        return True
    relations = {first["beside_dense"], second["beside_dense"]} - {"untold"}
    return not named[0] & named[1] or len(relations) > 1


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
