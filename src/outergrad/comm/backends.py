"""The backends of a process group, its store, and the host of that store."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

_LACKS = (RuntimeError, AttributeError, NotImplementedError)
"""Errors of a group that lacks something, also of one that is partly written in Python."""


def has_backend(group: dist.ProcessGroup, device: str) -> bool:
    """True if the group itself moves tensors of this device type: gloo stages CUDA through host."""
    try:
        name = group._get_backend(torch.device(device)).name().lower()
    except _LACKS:
        return False
    return device == "cpu" or name != "gloo"


def name_of(group: dist.ProcessGroup, device: str) -> str:
    """Returns the name of the backend that moves tensors of this device type; "" if unknown."""
    try:
        return group._get_backend(torch.device(device)).name().lower()
    except (RuntimeError, AttributeError):
        return ""


def is_gloo(group: dist.ProcessGroup) -> bool:
    """True if the group moves host tensors by gloo; other backends may behave otherwise."""
    try:
        return "gloo" in group._get_backend(torch.device("cpu")).name().lower()
    except _LACKS:
        return False


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Returns the group's own store, or None if its ranks share none.

    Groups of a third-party backend (`dist.Backend.register_backend`) often hold none, but PyTorch
    keeps the one that it made for them. Where there is none at all (MPI, unregistered groups), the
    store of the default group cannot stand in: without a name that all ranks know, two groups would
    write to the same keys.
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


USUAL_HOST = 0
"""Rank that holds the store with torchrun and `env://`."""


def ends_with(rank: int, store: Store) -> bool:
    """True if a store ends with this process, which has that rank in the group."""
    return _is_first(rank) and ends_with_a_site(store)


def is_torchs_own(store: Store) -> bool:
    """True if a store is written in C++: the clone of one in Python would lose its Python half."""
    return isinstance(_root(store), TCPStore | FileStore | HashStore)


def _root(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def ends_with_a_site(store: Store) -> bool:
    """True if a store may end with a site: unlike a file, or a store of torchrun's agent."""
    store = _root(store)
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return isinstance(store, TCPStore) and not is_agents


def _is_first(rank: int) -> bool:
    """True if this process holds the store, with `env://`."""
    return (dist.get_rank() if dist.is_initialized() else rank) == USUAL_HOST
