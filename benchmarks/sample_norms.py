"""Squared norms of samples' products: by pairs of rows in float64, or of formed products.

    python benchmarks/sample_norms.py

Least milliseconds of processor time, of layers with so many samples, rows per sample, outputs and
inputs; beside them the product of all rows, which a training without privacy forms.
"""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time
from typing import Any

import torch

from outergrad.linalg.sample_products import Product, _square

SHAPES = [(16, 65, 768, 192), (16, 65, 576, 192), (16, 65, 192, 192), (16, 64, 384, 384)]
SHAPES += [(16, 64, 512, 512), (4, 128, 1024, 1024), (8, 128, 384, 128), (8, 128, 512, 128)]


def least_ms(act: Callable[[], Any]) -> float:
    """Returns the least time of ten calls."""
    took_s = []
    for _ in range(10):
        began = thread_time()
        act()
        took_s.append(thread_time() - began)
    return 1e3 * min(took_s)


def main() -> None:
    """Prints a row per shape."""
    torch.set_num_threads(1)
    print("samples, rows, outputs, inputs | OI / L(O+I) | pairs | formed | product | chosen")
    for samples, rows, outputs, inputs in SHAPES:
        d, a = torch.randn(samples, 1, rows, outputs), torch.randn(samples, 1, rows, inputs)
        one, other = (Product("w", (0, outputs), d, a) for _ in range(2))
        d_NO, a_NI = d.flatten(0, 2), a.flatten(0, 2)
        ratio = outputs * inputs / (rows * (outputs + inputs))
        told = [
            least_ms(lambda d=d, a=a: _square(d, a)),
            least_ms(lambda one=one: one.formed().square().sum(dim=1)),
            least_ms(lambda d=d_NO, a=a_NI: d.mT @ a),
        ]
        chosen = "pairs" if one._pays(other) else "formed"
        shape = samples, rows, outputs, inputs
        print(shape, f"{ratio:.1f}", *(f"{ms:.1f}" for ms in told), chosen, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
