"""Fixed Gaussian matrices: random starts that are the same on every site and in every run."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_CPU = torch.device("cpu")


def gaussian_probe(width: int, columns: int, device: torch.device = _CPU) -> Tensor:
    """Returns a fixed Gaussian matrix (width, columns), float64.

    NumPy's generator gives the same numbers on every machine, and the leading columns do not
    depend on the number of columns requested.
    """
    return _probe_of_power(width, 1 << max(columns - 1, 0).bit_length(), device)[:, :columns]


@lru_cache(maxsize=64)
def _probe_of_power(width: int, columns: int, device: torch.device) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal((columns, width)).T).to(device)
