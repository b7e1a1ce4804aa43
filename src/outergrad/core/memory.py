"""Sharing of a tensor's memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_use_count = torch._C._storage_Use_Count


def holders(t: Tensor) -> int:
    """Number of tensors that share the storage of this one, itself included."""
    return _use_count(t.untyped_storage()._cdata) - 1  # minus this call's own


def most_holders(tensors: Iterable[Tensor]) -> int:
    """The largest number of `holders` of these tensors, in one call for all."""
    return max([_use_count(t.untyped_storage()._cdata) for t in tensors], default=1) - 1
