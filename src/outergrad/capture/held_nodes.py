"""Release of a session's autograd nodes before Python's full garbage collections.

A node that accumulates a gradient owns its parameter, which Python's garbage collector cannot see.
While a session holds such a node, the parameter counts as in use, and so do the hooks on it, their
session and the model. So a session and a model that are otherwise unreachable would never be freed.
"""

from __future__ import annotations

import gc
import sys
from functools import cache
from threading import Lock
from typing import Any, Protocol
from weakref import ref

_WHOLE = 2 if sys.version_info < (3, 14) else 1
"""Generation of a full collection. Younger generations are collected often, and contain no session
that has made a step."""


class Holder(Protocol):
    """An object that holds autograd nodes."""

    def let_go_of_nodes(self) -> None:
        """Drops the nodes until they are needed again; called in any thread, at any time."""
        ...


_lock = Lock()
_holders: tuple[ref[Any], ...] = ()


def holds_nodes(holder: Holder) -> None:
    """Registers a holder, held weakly, to drop its nodes before each full collection."""
    global _holders
    _install()
    with _lock:
        _holders = (*(r for r in _holders if r() is not None), ref(holder))


@cache
def _install() -> None:
    gc.callbacks.append(_let_go)


def _let_go(phase: str, info: dict[str, int]) -> None:
    if phase == "start" and info["generation"] >= _WHOLE:
        for r in _holders:
            if (holder := r()) is not None:
                holder.let_go_of_nodes()
