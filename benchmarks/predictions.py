"""What `outergrad plan` predicts beside what `outergrad bench` measures, as a table.

    python benchmarks/predictions.py --workload mlp --link 100mbit --rtt 40ms

The plan is made before and after the measurement, because other programs may slow the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

HEADINGS = (
    *("link", "method", "planned, ms", "measured, ms [quartiles]", "planned / measured"),
    *("x dense, planned", "x dense, measured", "bytes per step, planned", "planned / measured"),
)


def main() -> None:
    """Runs both on every link and prints a table."""
    args = arguments()
    print("| " + " | ".join(HEADINGS) + " |")
    print("|" + "---|" * len(HEADINGS))
    for rate in args.link.split(","):
        for row in compared(args, rate):
            print("| " + " | ".join(row) + " |", flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="mlp")
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--rtt", default="0ms")
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--methods", default="dense,dad,edad,rank-dad-4")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def compared(args: argparse.Namespace, rate: str) -> list[list[str]]:
    """A row per method on one link."""
    before = planned(args, rate)
    timings = measured(args, rate)
    after = planned(args, rate)
    plans_s = {n: mean([*before[n]["step_s"], *after[n]["step_s"]]) for n in before}
    dense_s = {t["method"]: t["median_s"] for t in timings}["dense"]
    rows = []
    for timing in timings:
        name, median_s = timing["method"], timing["median_s"]
        step_s, nbytes = plans_s[name], before[name]["wire_bytes"]
        share = f"{nbytes / timing['sent_bytes']:.3f}" if nbytes else "-"
        low, high = timing["quartiles_s"]
        rows.append(
            [
                rate if args.rtt == "0ms" else f"{rate}, {args.rtt}",
                name,
                milliseconds(step_s),
                f"{milliseconds(median_s)} [{milliseconds(low)}, {milliseconds(high)}]",
                f"{step_s / median_s:.2f}",
                f"{step_s / plans_s['dense']:.3f}",
                f"{median_s / dense_s:.3f}",
                f"{nbytes:,.0f}",
                share,
            ]
        )
    return rows


def planned(args: argparse.Namespace, rate: str) -> dict[str, Any]:
    """What the plan says of every method."""
    options = ["--model", args.workload, "--latency", args.rtt, "--threads", "1"]
    found = run("plan", "--json", rate, args, [*options, "--methods", args.methods])
    alone = {"step_s": found["alone_s"], "wire_bytes": 0}
    return {"alone": alone, **found["methods"]}


def measured(args: argparse.Namespace, rate: str) -> list[dict[str, Any]]:
    """What the bench found for every method."""
    options = ["--workload", args.workload, "--rtt", args.rtt, "--data-dir", "none"]
    options += ["--methods", f"alone,{args.methods}"]
    options += ["--steps", str(args.steps), "--rounds", str(args.rounds)]
    (link,) = run("bench", "--out", rate, args, options)["links"]
    return link["timings"]


def run(
    command: str, out: str, rate: str, args: argparse.Namespace, options: list[str]
) -> dict[str, Any]:
    """The JSON of a command."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        words = [sys.executable, "-m", "outergrad", command, out, str(path), "--link", rate]
        words += ["--sites", str(args.sites), *options]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


def milliseconds(seconds: float) -> str:
    """With a decimal where it says something."""
    return f"{1e3 * seconds:,.{0 if seconds >= 0.1 else 1}f}"


if __name__ == "__main__":
    main()
