"""Writes the checkpoints that later versions must be able to open.

Usage: python write_old_checkpoints.py

For every method a folder of two sites that were trained for some steps, and what the sites lost in
the steps after.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from ranks import run_ranks
from sites_that_save import METHODS, Site

OLD = Path(__file__).with_name("old")
SAVED, STEPS = 4, 7


def write(name: str) -> None:
    def body(rank, group):
        site = Site(METHODS[name], rank, group, OLD / name)
        site.run(SAVED, SAVED)
        return [site.step(step) for step in range(SAVED, STEPS)]

    losses = run_ranks(2, body)
    (OLD / name / "losses.json").write_text(json.dumps(losses) + "\n")


if __name__ == "__main__":
    for name in METHODS:
        write(name)
