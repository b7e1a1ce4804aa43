"""Whether there are NaN or infinities in a tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def is_finite(t: Tensor) -> bool:
    """Whether all elements are finite; one pass, as long as their sum is, too."""
    if not t.is_floating_point():
        return True
    dtype = torch.promote_types(t.dtype, torch.float32)
    return bool(t.sum(dtype=dtype).isfinite()) or bool(t.isfinite().all())
