"""Sharing of a tensor's memory."""

from __future__ import annotations

import torch
from torch import Tensor


def holders(t: Tensor) -> int:
    """Number of tensors that share the storage of this one, itself included."""
    return torch._C._storage_Use_Count(t.untyped_storage()._cdata) - 1  # minus this call's own
