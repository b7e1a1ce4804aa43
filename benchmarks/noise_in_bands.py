"""Noise in sums of many steps at the same ε, by the number of bands of `og.Private(bands=...)`.

    python benchmarks/noise_in_bands.py [STEPS]

512 of 60,000 rows in a batch, δ = 1e-5, against whoever gets the model, by Rényi divergences. A
figure is the standard deviation of the noise in the sum of the first t steps, in units of the clip,
as root mean square over t; in brackets the noise σ.
"""

from __future__ import annotations

import sys

from outergrad.private import CyclicPoisson, noise_for
from outergrad.private.correlated import noise_in_sums

RATE, DELTA = 512 / 60_000, 1e-5
BANDS = (1, 2, 4, 8, 16, 32, 64)
EPSILONS = (1.0, 3.0, 8.0)


def main(steps: int) -> None:
    """Prints a row per ε."""
    print("| ε |", *(f"{bands} |" for bands in BANDS))
    for epsilon in EPSILONS:
        cells = []
        for bands in BANDS:
            sampling = CyclicPoisson(RATE, bands)
            noise = noise_for(epsilon, DELTA, sampling, steps, accountant="rdp")
            cells.append(f"{noise * noise_in_sums(bands, steps):.1f} ({noise:.2f}) |")
        print(f"| {epsilon:g} |", *cells, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
