"""The host of a process group's store, and whether the store ends with that site."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

USUAL_HOST = 0
"""Rank that holds the store with torchrun and `env://`."""


def ends_with(rank: int, store: Store) -> bool:
    """True if a store ends with this process, which has that rank in the group."""
    return _is_first(rank) and ends_with_a_site(store)


def ends_with_a_site(store: Store) -> bool:
    """True if a store may end with a site: unlike a file, or a store of torchrun's agent."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return isinstance(store, TCPStore) and not is_agents


def _is_first(rank: int) -> bool:
    """True if this process holds the store, with `env://`."""
    return (dist.get_rank() if dist.is_initialized() else rank) == USUAL_HOST
