"""What a process group moves tensors with."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

_LACKS = (RuntimeError, AttributeError, NotImplementedError)
"""What a group raises that lacks something, one of which a part is written in Python too."""


def has_backend(group: dist.ProcessGroup, device: str) -> bool:
    """Whether the group moves tensors of this type of device; gloo stages CUDA through host."""
    try:
        name = group._get_backend(torch.device(device)).name().lower()
    except _LACKS:
        return False
    return device == "cpu" or name != "gloo"


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether the group moves tensors of the host by gloo: others may have other habits."""
    try:
        return "gloo" in group._get_backend(torch.device("cpu")).name().lower()
    except _LACKS:
        return False


def store_of(group: dist.ProcessGroup) -> Store | None:
    """The store of a group's own; None where there is none that its ranks share.

    Groups of a backend that is not PyTorch's often hold none (`dist.Backend.register_backend`), but
    PyTorch has kept the one that it made for them. Where there is none at all (MPI, groups that
    nobody has registered) the store of the default group is none either: without a name that all
    ranks know, two groups would write to the same keys.
    """
    try:
        store = group.get_group_store()
    except _LACKS:
        store = None
    if store is None:
        try:
            _, store = dist.distributed_c10d._world.pg_map[group]
        except (KeyError, TypeError):
            store = None
    return store
