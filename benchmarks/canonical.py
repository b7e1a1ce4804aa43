"""Time to make canonical factors of one layer, beside the product that they replace.

python benchmarks/canonical.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from outergrad import Factors
from outergrad.linalg.power import canonical

SHAPES = [
    (32, 1024, 1024),
    (32, 784, 1024),
    (16, 4096, 4096),
    (16, 25088, 4096),
    (64, 512, 512),
    (128, 1024, 1024),
]


def median_ms(work: Callable[[], object], repeats: int = 20) -> float:
    """Median milliseconds of a call, after one to warm up."""
    work()
    times_s = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times_s)


def main() -> None:
    """Prints a line per shape, on one thread."""
    torch.set_num_threads(1)
    print(f"{'N x I x O':>20}  canonical ms  local product ms")
    for rows, inputs, outputs in SHAPES:
        factors = Factors(torch.randn(1, rows, outputs), torch.randn(1, rows, inputs))
        ours = median_ms(partial(canonical, factors, rows, bias=True))
        product = median_ms(partial(torch.matmul, factors.d_GRO[0].T, factors.a_GRI[0]))
        print(f"{f'{rows} x {inputs} x {outputs}':>20}  {ours:12.2f}  {product:16.2f}")


if __name__ == "__main__":
    main()
