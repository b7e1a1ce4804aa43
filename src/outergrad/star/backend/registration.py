"""The names by which torch.distributed finds the backend, and what an address means."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler

from outergrad.star.backend.group import NAME, StarGroup
from outergrad.star.backend.store import HubStore
from outergrad.star.transport import TIMEOUT_S, Star, leave_all_stars

SCHEME = "star"
_SETTINGS = ("hub", "wait_s", "reach_s", "blind", "when_lost", "min_sites")
"""Settings that an address may have: those of `og.Star`, and for how long the hub may be away."""
_READ: dict[str, Callable[[str], Any]] = {
    "wait_s": float,
    "reach_s": float,
    "blind": {"0": False, "1": True}.__getitem__,
    "min_sites": int,
}


class _Begun:
    """The store of the group of all sites that this process began last."""

    count = 0
    """Number of such groups so far: each has names of its own at the hub."""
    store: weakref.ref[HubStore] | None = None


def register(*_: Any) -> None:
    """Registers the backend and its addresses; does nothing where both are registered."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _group, extended_api=True, devices=["cpu", "cuda"])
        register_rendezvous_handler(SCHEME, _meeting)
        # As atexit, but also at the end of the processes of multiprocessing.
        Finalize(None, leave_all_stars, exitpriority=0)


def star_at(address: str) -> tuple[Star, float]:
    """Returns the settings that an address means, and how long the hub may be out of reach.

    Args:
        address: as "star:///etc/site-a.kit?hub=hub.example.org:8443&wait_s=60". The path is that of
            the kit; without one, it is the file that `outergrad site --kit` was given. What stands
            behind "?" are settings of `og.Star`: hub, wait_s, blind (1 or 0), when_lost ("raise" or
            "go on"; a space is "+") and min_sites; and reach_s, the longest time, seconds, for
            which this site may not reach the hub, as `timeout` in sessions of `og.Star`.

    Raises:
        ValueError: the address has a setting that is none, or has no value for it.
    """
    parts = urlsplit(address)
    settings: dict[str, Any] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _SETTINGS:
            raise ValueError(f"{address}: {name!r} is none of {', '.join(_SETTINGS)}")
        try:
            settings[name] = _READ.get(name, str)(value)
        except ValueError:
            raise ValueError(f"{address}: {name}={value!r} is no number") from None
        except KeyError:
            raise ValueError(f"{address}: {name}={value!r}: pass 0 or 1") from None
    kit, reach_s = unquote(parts.netloc + parts.path), settings.pop("reach_s", TIMEOUT_S)
    if not 0 < reach_s < math.inf:
        raise ValueError(f"{address}: reach_s={reach_s}: pass seconds above 0")
    return Star(kit=kit or None, **settings), reach_s


def _meeting(
    address: str, rank: int = -1, world_size: int = -1, timeout: timedelta | None = None, **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """Yields the store of the run, this site's rank and the number of sites; for torch."""
    limit = timeout or dist.default_pg_timeout
    star, reach_s = star_at(address)
    held = star.connected(reach_s)
    line = held.line
    for told, is_so, what in ((rank, line.rank, "rank"), (world_size, len(line.names), "size")):
        if told not in (-1, is_so):
            raise ValueError(f"{address}: the hub says {what} {is_so}, not {told}: pass none")
    store = HubStore(held, limit)
    _Begun.count, _Begun.store = _Begun.count + 1, weakref.ref(store)
    yield PrefixStore(f"group {_Begun.count}", store), line.rank, len(line.names)
    raise RuntimeError("a site that is lost cannot begin again under the same address")


def _group(options: Any, _: Any) -> StarGroup:
    """Returns a new process group; for torch."""
    store = _Begun.store and _Begun.store()  # PyTorch loses the Python half of the one it passes
    if store is None:
        raise ValueError(f"{NAME}: pass init_method='{SCHEME}:///path/of/the/site.kit'")
    ranks = list(options.global_ranks_in_group) or list(range(len(store.held.line.names)))
    name = f"{_Begun.count}/{options.group_id}"
    group = StarGroup(store.held, name, ranks, options.timeout, store, options.store)
    group.setGroupName(options.group_id)
    return group
