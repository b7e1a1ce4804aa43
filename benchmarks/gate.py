"""Whether a step has become slower, beside DDP's and beside what was recorded.

    python benchmarks/gate.py             # ends with 1 if one has
    python benchmarks/gate.py --record    # takes today's figures as what later ones are held to

Two sites on this machine, no link in between, all methods in turn. A figure is the median over
rounds of a method's step over DDP's of the same round, and stands between two bounds that hold it
with 95% (of the order of the rounds, whatever their distribution). A method has become slower if
its lower bound is above the recorded upper one. Record and compare on the same machine, with
nothing beside: other processors have other ratios.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ratios import Ratio

from outergrad.launch.links import parse_link
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.results import Timing
from outergrad_lab.bench.run import bench

RECORDED = Path(__file__).parent / "results" / "gate.json"
WORKLOADS = ("deep-mlp", "gru", "mlp", "cnn", "gpt", "vit")
METHODS = ("ddp", "dense", "dad", "rank-dad-4")
WARMUP = 20
"""Steps until one is like those before it."""


def ratios(timings: Iterable[Timing]) -> dict[str, Ratio]:
    """Of all methods but DDP, whose steps were made in the same rounds."""
    rounds_s = {t.method: t.rounds_s for t in timings}
    ddp = rounds_s.pop("ddp")
    return {name: Ratio.between(own, ddp) for name, own in rounds_s.items()}


def measured(workload: str, rounds: int, steps: int) -> dict[str, Ratio]:
    """Of one workload, now."""
    plan = Plan(workload=workload, methods=METHODS, rounds=rounds, steps=steps, warmup=WARMUP)
    found = bench(plan, [parse_link("loopback")], ["gate.py"], lambda *_: None, shown=False)
    return ratios(found.links[0].timings)


def line(workload: str, method: str, now: Ratio, recorded: Ratio | None) -> str:
    """What is told of one figure."""
    told = f"{workload:9} {method:11} {now}"
    if recorded is None:
        return told
    return f"{told}   {'SLOWER than' if now.is_slower_than(recorded) else 'recorded'} {recorded}"


def compare(
    found: Mapping[str, Mapping[str, Ratio]], recorded: Mapping[str, Mapping[str, Ratio]]
) -> list[str]:
    """Prints all figures; returns the names of those that are slower."""
    slower = []
    for workload, methods in found.items():
        for method, now in methods.items():
            before = recorded.get(workload, {}).get(method)
            print(line(workload, method, now, before))
            if before is not None and now.is_slower_than(before):
                slower.append(f"{workload} by {method}")
    return slower


def load(path: Path) -> dict[str, dict[str, Ratio]]:
    """What was recorded; nothing without a file."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return {w: {m: Ratio(**r) for m, r in methods.items()} for w, methods in found.items()}


def save(path: Path, found: Mapping[str, Mapping[str, Ratio]]) -> None:
    """Records."""
    plain = {w: {m: asdict(r) for m, r in methods.items()} for w, methods in found.items()}
    path.write_text(json.dumps(plain, indent=1) + "\n")


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="with commas")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10, help="in a round of each method")
    parser.add_argument("--file", type=Path, default=RECORDED, help="what was recorded")
    parser.add_argument("--record", action="store_true", help="takes these figures for later ones")
    args = parser.parse_args(given)
    found = {w: measured(w, args.rounds, args.steps) for w in args.workloads.split(",")}
    slower = compare(found, load(args.file))
    if args.record:
        save(args.file, {**load(args.file), **found})
        return 0
    if slower:
        print(f"slower than recorded: {', '.join(slower)}")
    return bool(slower)


if __name__ == "__main__":
    sys.exit(main())
