"""Time of each low-rank solver by shape, and whether "auto" picks the fastest.

python benchmarks/solvers.py --rows 8,64,512 --widths 512,1024 --ranks 4
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, get_args

import torch

from outergrad import Factors
from outergrad.linalg.compress import Solver, choose_solver, compress
from outergrad.linalg.subspace import SUBSPACE_ITERATIONS

ROWS = "8,16,32,64,128,256,512,1024,2048"
WIDTHS = "128,512,1024,4096"
RANKS = "1,4,8,32"
SOLVERS = [name for name in get_args(Solver) if name != "auto"]


def decaying_factors(rows: int, inputs: int, outputs: int) -> Factors:
    """Rows of falling size along mixed directions: a spectrum like that of a real gradient."""
    size_N1 = torch.arange(1, rows + 1).pow(-1.0)[:, None]
    mix_NN = torch.linalg.qr(torch.randn(rows, rows)).Q
    d_NO = mix_NN @ (size_N1 * torch.randn(rows, outputs))
    return Factors(d_NO[None], (mix_NN @ torch.randn(rows, inputs))[None])


def median_ms(work: Any, seconds: float) -> float:
    """Median milliseconds of a call, after one to warm up, of as many as fit into the time."""
    work()
    times_s: list[float] = []
    while not times_s or sum(times_s) < seconds:
        began = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times_s)


def times_ms(factors: Factors, rank: int, options: argparse.Namespace) -> dict[str, float]:
    """Per solver; subspace iteration also from where it ended, as in the middle of training."""
    decompose = partial(compress, factors, rank, options.tolerance)
    times = {
        name: median_ms(partial(decompose, solver=name), options.seconds)
        for name in options.solvers
    }
    warm_GIR = decompose(solver="subspace_iteration").a_GRI.mT
    warm = partial(decompose, solver="subspace_iteration", iterations=1, q_GIR=warm_GIR)
    return times | {"warm x1": median_ms(warm, options.seconds)}


def shapes(options: argparse.Namespace) -> Iterator[tuple[int, int, int, int]]:
    """(N, I, O, R) with R below the largest rank that there can be; I and O are symmetric."""
    for rows, inputs, outputs, rank in product(
        options.rows, options.widths, options.widths, options.ranks
    ):
        if outputs <= inputs and rank < min(rows, outputs):
            yield rows, inputs, outputs, rank


def integers(text: str) -> list[int]:
    """A list from the command line."""
    return [int(word) for word in text.split(",")]


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=integers, default=integers(ROWS))
    parser.add_argument("--widths", type=integers, default=integers(WIDTHS))
    parser.add_argument("--ranks", type=integers, default=integers(RANKS))
    parser.add_argument("--tolerance", type=float, default=0.0)
    parser.add_argument("--solvers", type=lambda text: text.split(","), default=SOLVERS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.2, help="per solver and shape")
    return parser.parse_args()


def main() -> None:
    """Prints a line per shape, and how much slower "auto" was than the fastest in all."""
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    columns = [*options.solvers, "warm x1"]
    print(f"milliseconds on {options.threads} thread(s), tolerance {options.tolerance}")
    print(f"{'N':>5} {'I':>5} {'O':>5} {'R':>3}", *(f"{name:>18}" for name in columns), end="")
    print(f" {'auto':>18} {'fastest':>18}")
    regret = []
    for rows, inputs, outputs, rank in shapes(options):
        times = times_ms(decaying_factors(rows, inputs, outputs), rank, options)
        auto = choose_solver(rows, inputs, outputs, rank, SUBSPACE_ITERATIONS)
        fastest = min(options.solvers, key=times.__getitem__)
        regret.append(times.get(auto, times[fastest]) / times[fastest])
        print(f"{rows:5} {inputs:5} {outputs:5} {rank:3}", end=" ")
        print(*(f"{times[name]:18.2f}" for name in columns), end="")
        print(f" {auto:>18} {fastest:>18}", flush=True)
    print(f"auto / fastest: median {statistics.median(regret):.2f}, worst {max(regret):.2f}")


if __name__ == "__main__":
    main()
