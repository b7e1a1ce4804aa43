"""Who holds the store of a process group, and whether it ends with that site."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

USUAL_HOST = 0
"""torchrun and `env://` have the first site hold the store."""


def ends_with(rank: int, store: Store) -> bool:
    """Whether a store ends with this process, the site of that rank in the group."""
    return _is_first(rank) and ends_with_a_site(store)


def ends_with_a_site(store: Store) -> bool:
    """Whether a store may end with a site: not a file, nor what torchrun's agent holds."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return isinstance(store, TCPStore) and not is_agents


def _is_first(rank: int) -> bool:
    """Whether this process is the one that holds the store, with `env://`."""
    return (dist.get_rank() if dist.is_initialized() else rank) == USUAL_HOST
