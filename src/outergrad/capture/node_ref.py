"""Weak references to autograd nodes, and the uses of a slot whose graphs are alive."""

from __future__ import annotations

import gc
import sys
import time
from functools import cache
from threading import Lock
from typing import Any, NamedTuple, Protocol
from weakref import ref

import numpy as np
import torch

from outergrad.capture.engine import will_run

_TOKEN = "outergrad_token"
_runs = torch._C._will_engine_execute_node
_TRIES, _PAUSE_S = 20, 0.05


class NodeRef:
    """A weak reference to a custom function's node, valid even if Python has cleared it by mistake.

    Python's garbage collector traverses a tensor to its node only while each is the sole owner of
    the next. A thread without the interpreter's lock may change that while another thread collects.
    The collector then takes the node for garbage, clears the weak references to it, and finds it
    alive. It does not track arrays: a weak reference to an array that the node holds lasts as long
    as the node, and through it the node is found again.

    Attributes:
        known: weak reference to the node, which the collector may have cleared by mistake.
    """

    __slots__ = ("_kind", "_token", "known")

    def __init__(self, node: Any) -> None:
        held = getattr(node, _TOKEN, None)  # a compiled graph is one node with several taps
        token = np.empty(0) if held is None else held[0]
        setattr(node, _TOKEN, [token])
        self.known, self._token, self._kind = ref(node), ref(token), ref(type(node))

    def __call__(self) -> Any:
        """Returns the node, or None if it is gone.

        Raises:
            RuntimeError: the node is alive, but cannot be found.
        """
        node = self.known()
        if node is None and self.lives():
            node = self._found()
        return node

    def lives(self) -> bool:
        """True while the node exists."""
        return self._token() is not None

    def _found(self) -> Any:
        # Several tries, as a collection that still runs may hide the node for a moment.
        for _ in range(_TRIES):
            token, kind = self._token(), self._kind()
            if token is None or kind is None:
                return None
            node = _holder(token, kind)
            if node is not None:
                self.known = ref(node)
                return node
            time.sleep(_PAUSE_S)
        raise RuntimeError(
            "a node of autograd's graph that lives cannot be found any more: this step is void; "
            "call optimizer.zero_grad() and go on, and please report it"
        )


def _holder(token: np.ndarray, kind: type) -> Any:
    # Each node refers to its class. The search walks all objects, but is rarely needed.
    for node in gc.get_referrers(kind):
        if type(node) is kind and vars(node).get(_TOKEN, [None])[0] is token:
            return node
    return None


_FEW = 16


class LiveUse(NamedTuple):
    """One use of a slot in forward.

    Attributes:
        node: weak reference to the tap's node.
        rows: N, the number of rows.
        dtype: dtype of the output.
    """

    node: NodeRef
    rows: int
    dtype: torch.dtype


class LiveUses:
    """Uses of one slot that a backward may still reach; dead ones are dropped as uses are added."""

    def __init__(self) -> None:
        self._uses: list[LiveUse] = []
        self._most = _FEW

    def add(self, node: Any, rows: int, dtype: torch.dtype) -> None:
        """Adds a use, whose node is held weakly."""
        if len(self._uses) >= self._most:
            self._uses = [use for use in self._uses if use.node.lives()]
            self._most = max(_FEW, 2 * len(self._uses))
        self._uses.append(LiveUse(NodeRef(node), rows, dtype))

    def any_alive(self) -> bool:
        """True if a backward may still reach a use; drops dead ones."""
        self._uses = [use for use in self._uses if use.node.lives()] if self._uses else self._uses
        return bool(self._uses)

    def reached(self) -> list[LiveUse]:
        """Returns the uses that the current backward will reach; drops dead ones."""
        alive, found = list[LiveUse](), list[LiveUse]()
        for use in self._uses:
            node = use.node.known() or use.node()
            if node is not None:
                alive.append(use)
                if _runs(node) or will_run(node):
                    found.append(use)
        self._uses = alive
        return found

    def told(self, node: Any) -> str:
        """Describes an unexpected node and the known uses, for an error message."""
        known = "known" if any(use.node() is node for use in self._uses) else "unknown"
        within = "in" if will_run(node) else "not in"
        alive = sum(use.node.lives() for use in self._uses)
        here = f"{len(self._uses)} uses, {alive} alive, {len(self.reached())} in this backward"
        return f"{here}; this one {known} and {within} it"


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
    """Registers a holder, held weakly, to drop its nodes before each full collection.

    A node that accumulates a gradient owns its parameter, which Python's garbage collector cannot
    see. While a session holds such a node, the parameter counts as in use, and so do the hooks on
    it, their session and the model. So a session and a model that are otherwise unreachable would
    never be freed.
    """
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
