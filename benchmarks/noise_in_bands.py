"""Noise in sums of many steps at the same ε, by the number of bands of `og.Private(bands=...)`.

    python benchmarks/noise_in_bands.py [STEPS]

512 of 60,000 rows in a batch, δ = 1e-5, against whoever gets the model, by Rényi divergences. A
figure is the standard deviation of the noise in the sum of the first t steps, in units of the clip,
as root mean square over t; in brackets the noise σ.
"""

from __future__ import annotations

import math
import sys

import numpy as np

from outergrad.private import CyclicPoisson, noise_for
from outergrad.private.correlated import coefficients

RATE, DELTA = 512 / 60_000, 1e-5
BANDS = (1, 2, 4, 8, 16, 32, 64)
EPSILONS = (1.0, 3.0, 8.0)


def error(bands: int, steps: int) -> float:
    """Root mean square of the noise in sums, for σ = 1: of the first column of C⁻¹, summed up."""
    c = coefficients(min(bands, steps))
    inverse = np.zeros(steps)
    for t in range(steps):
        inverse[t] = float(t == 0) - sum(c[j] * inverse[t - j] for j in range(1, min(bands, t + 1)))
    variance_T = (inverse.cumsum() ** 2).cumsum()
    return math.hypot(*c) * math.sqrt(variance_T.mean())


def main(steps: int) -> None:
    """Prints a row per ε."""
    print("| ε |", *(f"{bands} |" for bands in BANDS))
    for epsilon in EPSILONS:
        cells = []
        for bands in BANDS:
            sampling = CyclicPoisson(RATE, bands)
            noise = noise_for(epsilon, DELTA, sampling, steps, accountant="rdp")
            cells.append(f"{noise * error(bands, steps):.1f} ({noise:.2f}) |")
        print(f"| {epsilon:g} |", *cells, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
