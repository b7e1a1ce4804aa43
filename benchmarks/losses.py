r"""Loss after the same training, by method: mean over seeds, and the lowest and highest.

    python benchmarks/losses.py --data spoken-digits --model gru --epochs 10 \
        --methods ddp,powersgd-4,rank-dad:rank=8:wire=bf16

Every training is an `outergrad train` of its own; the loss is the mean over its last epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Own options, and those that `outergrad train` gets."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", type=lambda text: text.split(","), required=True)
    parser.add_argument("--seeds", type=int, default=3)
    return parser.parse_known_args()


def train(method: str, seed: int, options: list[str]) -> dict[str, Any]:
    """The last line of a training's log."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        command = [sys.executable, "-m", "outergrad", "train", *options]
        command += ["--method", method, "--seed", str(seed), "--log", str(log)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(log.read_text().splitlines()[-1])


def spread(values: list[float], form: str) -> str:
    """Mean and range."""
    mean, low, high = (form.format(x) for x in (statistics.mean(values), min(values), max(values)))
    return f"{mean} [{low}, {high}]"


def main() -> None:
    """A table with a line per method."""
    options, passed_on = parse()
    print("| method | loss [lowest, highest] | test accuracy | kB per step |")
    print("|---|---|---|---|")
    for method in options.methods:
        runs = [train(method, seed, passed_on) for seed in range(options.seeds)]
        loss = spread([run["loss"] for run in runs], "{:.4f}")
        accuracy = spread([100 * run["test_accuracy"] for run in runs], "{:.2f}")
        sent = runs[0]["sent_bytes"]
        kilobytes = "not counted" if sent is None else f"{sent / 1e3:,.1f}"
        print(f"| {method} | {loss} | {accuracy} % | {kilobytes} |", flush=True)


if __name__ == "__main__":
    main()
