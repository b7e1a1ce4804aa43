"""Peak memory of training, compared between methods.

    python benchmarks/memory.py --model vgg --methods ddp,dad

Each method trains in processes of its own on loopback. Counted is the peak of resident
memory above what the process held after its imports, before it built the model. See README.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import links
import options as common
import sites


def main() -> None:
    """Runs as one of the sites, or starts them method by method and prints a table."""
    options = parse()
    if sites.is_site():
        print(run_site(options))
        return
    peaks: dict[str, list[int]] = {method: [] for method in options.methods}
    for turn in range(options.repeats):
        for method in options.methods:
            sites.progress(f"round {turn + 1}/{options.repeats}: {method}")
            peaks[method].append(run_method(options, method))
    sites.progress("")
    rows = summarise(peaks)
    print_table(rows)
    common.save(options, rows)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = common.parser(__doc__)
    parser.set_defaults(model="vgg")
    parser.add_argument("--steps", type=int, default=5, help="the first and the later ones count")
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes per method")
    return parser.parse_args()


def run_method(options: argparse.Namespace, method: str) -> int:
    """Trains under one method in fresh processes; returns the largest peak among the sites."""
    with links.places(options.sites, "none") as places:
        arguments = [*sys.argv, "--methods", method]
        return max(sites.run(arguments, places, options.threads))


def run_site(options: argparse.Namespace) -> int:
    """Returns the bytes by which this process's peak rose while it trained."""
    from trainer import trainer

    (method,) = options.methods
    with sites.group(options.timeout) as (rank, _):
        import_method(method)
        reset_peak()
        before = resident_bytes("VmRSS")
        step = trainer(options.model, method, rank)
        for _ in range(options.steps):
            step()
        return resident_bytes("VmHWM") - before


def import_method(method: str) -> None:
    """Loads what a method is made of, so that its code does not count as its memory."""
    if method not in ("alone", "ddp"):
        import outergrad  # noqa: F401


def reset_peak() -> None:
    """Has Linux forget the peak so far; ``ru_maxrss`` would keep the imports' own."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(field: str) -> int:
    """Reads ``VmRSS``, the resident memory now, or ``VmHWM``, its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"This system does not tell {field}: the benchmark needs Linux.")


def summarise(peaks: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Makes one row per method: the median and the extremes over repeats."""
    return [
        {
            "method": method,
            "median_bytes": statistics.median(found),
            "range_bytes": [min(found), max(found)],
        }
        for method, found in peaks.items()
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints one line per method, with ratios to DDP's."""
    print(f"{'method':<16}{'peak MB':>10}  {'[least, most]':<20}{'/ddp':>8}")
    for row in rows:
        least, most = (found / 1e6 for found in row["range_bytes"])
        print(
            f"{row['method']:<16}{row['median_bytes'] / 1e6:>10.1f}  "
            f"{f'[{least:.1f}, {most:.1f}]':<20}{common.ratio(row, rows, 'median_bytes'):>8}"
        )


if __name__ == "__main__":
    main()
