"""Nodes of autograd's graphs, held as long as their graph lives."""

from __future__ import annotations

import sys
from typing import Any


class LiveNodes:
    """Holds on to nodes as long as autograd does, so that weak references to them stay true.

    A weak reference alone does not: Python's garbage collector looks through tensors at their
    nodes only while it finds each to be the sole owner of the next, and a thread without the
    interpreter's lock may change that while the collector of another one looks. It then takes the
    node for garbage, clears the references to it, and finds that it lives.
    """

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._most = 1

    def hold(self, node: Any) -> None:
        """Takes in a new one.

        Those of the last graph are let go if it is gone, from its end, as each holds the one
        before; others when there are twice as many as lived when last looked at.
        """
        while self._nodes and _references(self._nodes) <= _ALONE:
            self._nodes.pop()
        if len(self._nodes) >= self._most:
            self._nodes = _living(self._nodes)
            self._most = 2 * len(self._nodes) + 1
        self._nodes.append(node)


def _living(nodes: list[Any]) -> list[Any]:
    """Those whose graphs live, in the order they came; the list is used up."""
    living = []
    while nodes:
        if _references(nodes) > _ALONE:
            living.append(nodes[-1])
        nodes.pop()
    return living[::-1]


def _references(nodes: list[Any]) -> int:
    """To the last: a graph that lives holds one."""
    return sys.getrefcount(nodes[-1])


_ALONE = _references([object()])
