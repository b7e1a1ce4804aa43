"""Peak memory of training, compared between methods.

    python benchmarks/memory.py --workload vgg --methods ddp,dad

Each method trains in processes of its own on loopback. Counted is the peak of resident
memory above what the process held after its imports, before it built the model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from outergrad.launch.console import errors_in_one_line
from outergrad.launch.links import Place, parse_link, places
from outergrad.launch.processes import run_processes
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.trainer import Trainer, dataset


def main() -> None:
    """Measures method by method, in turns, and prints a table."""
    options = parse()
    peaks: dict[str, list[int]] = {method: [] for method in options.methods}
    with errors_in_one_line():
        for turn in range(options.repeats):
            for method in options.methods:
                print(f"round {turn + 1}/{options.repeats}: {method}", file=sys.stderr)
                plan = Plan(workload=options.workload, methods=(method,), sites=options.sites)
                peaks[method].append(largest_peak(plan, options.steps))
    print_table(peaks)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", default="vgg")
    parser.add_argument(
        "--methods",
        type=lambda text: text.split(","),
        default=["alone", "ddp", "dense", "dad", "dad-activations"],
    )
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="the first and the later ones count")
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes per method")
    return parser.parse_args()


def largest_peak(plan: Plan, steps: int) -> int:
    """Trains in fresh processes; returns the largest peak among the sites, in bytes."""
    link = parse_link("loopback")
    with places(plan.sites, link) as sites, tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        works = [partial(peak, plan, steps, place, store, site) for site, place in enumerate(sites)]
        return max(run_processes(works))


def peak(plan: Plan, steps: int, place: Place, store: str, site: int) -> int:
    """Returns the bytes by which this process's peak rose while it trained."""
    place.enter()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=site, world_size=plan.sites)
    data, _ = dataset(plan)
    reset_peak()
    before = resident_bytes("VmRSS")
    trainer = Trainer(plan, plan.methods[0], data, site)
    for _ in range(steps):
        trainer.step()
    rise = resident_bytes("VmHWM") - before
    dist.barrier()  # no site may leave while another still waits for its bytes
    return rise


def reset_peak() -> None:
    """Has Linux forget the peak so far; ``ru_maxrss`` would keep the imports' own."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(field: str) -> int:
    """Reads ``VmRSS``, the resident memory now, or ``VmHWM``, its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"This system does not tell {field}: the benchmark needs Linux.")


def print_table(peaks: dict[str, list[int]]) -> None:
    """Prints one line per method: the median and the extremes over repeats."""
    medians = {method: statistics.median(found) for method, found in peaks.items()}
    print(f"{'method':<16}{'peak MB':>10}  {'least to most':<20}{'/ddp':>8}")
    for method, found in peaks.items():
        ratio = f"{medians[method] / medians['ddp']:.3f}" if "ddp" in medians else "-"
        spread = f"{min(found) / 1e6:.1f} to {max(found) / 1e6:.1f}"
        print(f"{method:<16}{medians[method] / 1e6:>10.1f}  {spread:<20}{ratio:>8}")


if __name__ == "__main__":
    main()
