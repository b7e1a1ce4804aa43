"""Who holds on to a tensor's memory."""

from __future__ import annotations

import torch
from torch import Tensor


def holders(t: Tensor) -> int:
    """How many tensors lie in the memory of this one, itself counted."""
    return torch._C._storage_Use_Count(t.untyped_storage()._cdata) - 1  # the call is one, too
