"""The uses of one slot whose graphs are alive."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from outergrad.capture.node_ref import NodeRef
from outergrad.capture.tap import will_run

_FEW = 16


class LiveUse(NamedTuple):
    """One use.

    Attributes:
        node: of its tap, as long as it lives.
        rows: N.
        dtype: of its output.
    """

    node: NodeRef
    rows: int
    dtype: torch.dtype


class LiveUses:
    """Those that a backward may still reach; of the others nothing is kept for long."""

    def __init__(self) -> None:
        self._uses: list[LiveUse] = []
        self._most = _FEW

    def add(self, node: Any, rows: int, dtype: torch.dtype) -> None:
        """Takes in a new one."""
        if len(self._uses) >= self._most:
            self._uses = [use for use in self._uses if use.node.lives()]
            self._most = max(_FEW, 2 * len(self._uses))
        self._uses.append(LiveUse(NodeRef(node), rows, dtype))

    def reached(self) -> list[LiveUse]:
        """Those that the current backward will come to."""
        return [use for use in self._uses if will_run(use.node())]

    def told(self, node: Any) -> str:
        """What is known of one that was not expected, for an error message."""
        known = "known" if any(use.node() is node for use in self._uses) else "unknown"
        within = "in" if will_run(node) else "not in"
        alive = sum(use.node.lives() for use in self._uses)
        here = f"{len(self._uses)} uses, {alive} alive, {len(self.reached())} in this backward"
        return f"{here}; this one {known} and {within} it"
