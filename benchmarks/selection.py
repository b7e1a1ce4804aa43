"""Choosing what a sparse gradient sends: whether thresholds are met, and what the choice costs.

    python benchmarks/selection.py density       # share of entries above SIDCo's thresholds
    python benchmarks/selection.py time          # beside torch.topk, on one thread and on two
    python benchmarks/selection.py bytes         # of the places

Densities are those of gradients of three trainings: of the whole model, and of each parameter of
at least 10000 entries, at several steps. A number is the share of entries above the threshold,
over the density that was asked for: the smallest and the largest found.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from outergrad.linalg.selection import (
    FITS,
    above,
    blocks_of,
    entries_of,
    exceeding,
    random_k,
    threshold,
    top_blocks,
    top_k,
)
from outergrad.messages.places import nbytes, packed, unpacked
from outergrad_lab.data import Dataset, Format, load
from outergrad_lab.models import build_model
from outergrad_lab.workloads import WORKLOADS

DENSITIES = (0.1, 0.01, 0.001)
STEPS = (1, 20, 50)
FEWEST = 10_000
ENTRIES = 10**7
BLOCK = 64


def training(name: str, data_dir: Path) -> tuple[nn.Module, Dataset, int, float]:
    """A model, its data, its batch size and its learning rate."""
    if name == "cnn-mnist":
        data = load("mnist", data_dir).mapped(lambda x: x.view(-1, 1, 28, 28))
        return build_model("cnn", Format(shape=(1, 28, 28), classes=10), ()), data, 32, 1e-3
    recipe = WORKLOADS[name]
    assert recipe.data is not None
    return recipe.build(), load(recipe.data, data_dir), recipe.batch_size, recipe.lr


def gradients(name: str, data_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Flat gradients with what they are of, at some steps of a training by Adam."""
    torch.manual_seed(0)
    model, data, batch_size, lr = training(name, data_dir)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(1, max(STEPS) + 1):
        rows = torch.randint(len(data.x_train), (batch_size,))
        optimizer.zero_grad()
        cross_entropy(model(data.x_train[rows]), data.y_train[rows]).backward()
        if step in STEPS:
            yield from flat_gradients(model)
        optimizer.step()


def flat_gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Of the whole model, and of each parameter that is not small."""
    flat = {name: p.grad.flatten() for name, p in model.named_parameters() if p.grad is not None}
    yield "model", torch.cat([*flat.values()])
    yield from ((name, t) for name, t in flat.items() if len(t) >= FEWEST)


def thresholds(density: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions that estimate one: the paper's with one stage and several, and ours."""
    stages = math.ceil(math.log(1 / density, 4))
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for fit in FITS:
        for count in sorted({1, stages}):
            found[f"{fit}, {count}"] = lambda g, f=fit, s=count: threshold(g, density, f, s)
    for fit in FITS:
        found[f"{fit}, counted"] = lambda g, f=fit: threshold(g, density, f)
    return found


def hit(flat: Tensor, density: float, estimate: Callable[[Tensor], Tensor]) -> float:
    """Entries above the threshold over those that were asked for."""
    wanted = density * len(flat)
    return len(exceeding(flat, estimate(flat)).indices_C) / wanted


def print_densities(data_dir: Path) -> None:
    """A line per workload, density and way to estimate."""
    print(f"{'':10} density  {'fit, stages':22} {'model':>13} {'parameters':>13}")
    for name in ("gpt", "cnn-mnist", "gru"):
        cases = list(gradients(name, data_dir))
        for density in DENSITIES:
            for label, estimate in thresholds(density).items():
                hits = [(of == "model", hit(t, density, estimate)) for of, t in cases]
                whole, parts = ([h for w, h in hits if w is is_model] for is_model in (True, False))
                shown = (f"{min(part):.2f} to {max(part):.2f}" for part in (whole, parts))
                print(f"{name:10} {density:<8g} {label:22} " + " ".join(f"{t:>13}" for t in shown))


def fastest_ms(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Least milliseconds of each call, taken in turns: others may use the machine, too."""
    found_s = dict.fromkeys(ways, math.inf)
    for _ in range(rounds):
        for way, work in ways.items():
            began = time.perf_counter()
            work()
            found_s[way] = min(found_s[way], time.perf_counter() - began)
    return {way: 1e3 * least_s for way, least_s in found_s.items()}


def ways_to_select(flat: Tensor, magnitudes: Tensor, k: int) -> dict[str, Callable[[], object]]:
    """Functions that select k entries."""
    return {
        "torch.topk": lambda: magnitudes.topk(k, sorted=False),
        "above": lambda: above(flat, k),
        "threshold": lambda: exceeding(flat, threshold(flat, k / len(flat))),
        "top_k": lambda: top_k(flat, k),
        "blocks": lambda: top_blocks(flat, k, BLOCK),
        "random": lambda: random_k(len(flat), k, 0),
        "random blocks": lambda: random_blocks(len(flat), k),
    }


def random_blocks(n: int, k: int) -> Tensor:
    """The places of k entries of n, in blocks that are drawn."""
    return entries_of(random_k(-(-n // BLOCK), -(-k // BLOCK), 0), n, BLOCK)


def print_times(rounds: int) -> None:
    """A line per number of threads and density."""
    torch.manual_seed(0)
    flat = torch.randn(ENTRIES) * torch.randn(ENTRIES).exp()
    magnitudes = flat.abs()
    ways = ways_to_select(flat, magnitudes, 1)
    print("threads density " + " ".join(f"{way:>13}" for way in ways) + "   above / topk")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for density in DENSITIES:
            k = round(density * ENTRIES)
            ms = fastest_ms(ways_to_select(flat, magnitudes, k), rounds)
            shown = " ".join(f"{value:10.1f} ms" for value in ms.values())
            ratio = ms["above"] / ms["torch.topk"]
            print(f"{threads:7} {density:<7g} {shown}   {ratio:12.2f}", flush=True)


def print_bytes(rounds: int) -> None:
    """A line per density: bits per place, and beside the least that is possible."""
    print("density  bits per place  least  of blocks of 64  packed  unpacked")
    for density in DENSITIES:
        k = round(density * ENTRIES)
        places = random_k(ENTRIES, k, 0)
        content = packed(places, ENTRIES)
        bits = 8 * nbytes(ENTRIES, k) / k
        of_blocks = 8 * nbytes(-(-ENTRIES // BLOCK), blocks_of(ENTRIES, k, BLOCK)[0]) / k
        least = sum(-p * math.log2(p) for p in (density, 1 - density)) / density
        work: dict[str, Callable[[], object]] = {
            "packed": lambda places=places: packed(places, ENTRIES),
            "unpacked": lambda content=content, k=k: unpacked(content, ENTRIES, k),
        }
        shown = "  ".join(f"{ms:5.1f} ms" for ms in fastest_ms(work, rounds).values())
        print(f"{density:<7g}  {bits:14.2f}  {least:5.2f}  {of_blocks:15.2f}  {shown}")


def main() -> None:
    """Prints the tables that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tables", nargs="*", metavar="density|time|bytes")
    parser.add_argument("--data-dir", type=Path, default=Path("../shared/data"))
    parser.add_argument("--rounds", type=int, default=15, help="of which the fastest counts")
    options = parser.parse_args()
    tables = {
        "density": lambda: print_densities(options.data_dir),
        "time": lambda: print_times(options.rounds),
        "bytes": lambda: print_bytes(options.rounds),
    }
    for table in options.tables or tables:
        tables[table]()


if __name__ == "__main__":
    main()
