"""Test for NaN and infinities in a tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def is_finite(t: Tensor) -> bool:
    """True if all elements are finite; takes one pass if their sum is finite, too."""
    if not t.is_floating_point():
        return True
    dtype = torch.promote_types(t.dtype, torch.float32)
    return bool(t.sum(dtype=dtype).isfinite()) or bool(t.isfinite().all())
