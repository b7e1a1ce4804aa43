"""Sessions hold nodes of autograd, and let go of them while Python looks for garbage.

A node that accumulates a gradient owns its parameter, which Python's collector cannot see: while a
session holds one, the parameter is in use, with the hooks on it, the session behind these, and the
model. So a session and a model that nobody has any more would stay for ever.
"""

from __future__ import annotations

import gc
import sys
from functools import cache
from threading import Lock
from typing import Any, Protocol
from weakref import ref

_WHOLE = 2 if sys.version_info < (3, 14) else 1
"""The generation that holds what is old. Younger ones are looked through often, and find no session
that has made a step."""


class Holder(Protocol):
    """Who holds nodes."""

    def let_go_of_nodes(self) -> None:
        """Holds none, until it needs them again: any thread may call it, at any time."""
        ...


_lock = Lock()
_holders: tuple[ref[Any], ...] = ()


def holds_nodes(holder: Holder) -> None:
    """Lets a holder know when Python looks for garbage."""
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
