"""Notifications of backward passes: before each begins, and after one raises.

Autograd calls hooks only at nodes that its engine reaches. A backward that raises before it reaches
a watched node, as in a custom loss, would go unnoticed. So the function through which
`torch.autograd` calls its engine is wrapped when the first listener is added.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from threading import Lock
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from outergrad.capture.engine import NO_TASK, current_task, untraced

_ORDER = itertools.count(1)
_LISTENERS: set[ref[BackwardListener]] = set()
_LOCK = Lock()


@dataclass(frozen=True)
class FailedBackward:
    """A backward for parameter gradients that raised; not one nested in another backward.

    Attributes:
        began: number of its start, in the order of `now`.
        outputs: the tensors or graph edges that were differentiated.
        inputs: the leaves that were to get gradients; empty for all leaves.
    """

    began: int
    outputs: Sequence[Any]
    inputs: Sequence[Any]

    def nodes(self) -> set[Node]:
        """Returns all nodes the backward could have reached; if `inputs` is not empty, only theirs.

        Walks the graph, which exists as long as the outputs do.
        """
        found, left = set[Node](), _nodes_of(self.outputs)
        while left:
            node = left.pop()
            if node not in found:
                found.add(node)
                left += [below for below, _ in node.next_functions if below is not None]
        return found & set(_nodes_of(self.inputs)) if self.inputs else found


class BackwardListener(Protocol):
    """Receives events of backwards that leave gradients in parameters, maybe of another model."""

    def on_backward(self, outputs: Sequence[Any]) -> None:
        """Called before a backward of these outputs begins in this thread; not for a nested one."""
        ...

    def on_failed_backward(self, failed: FailedBackward) -> None:
        """Called when a backward of this thread has raised."""
        ...


def now() -> int:
    """Returns a number greater than all returned before, in any thread."""
    return next(_ORDER)


def listen_to_backwards(listener: BackwardListener) -> None:
    """Notifies a listener, held weakly, of every backward of this process."""
    with _LOCK:
        _LISTENERS.add(ref(listener, _LISTENERS.discard))
        run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        if not hasattr(run, "tells_of_backwards"):
            torch.autograd._engine_run_backward = _telling(run)  # type: ignore[attr-defined]


def ignore_backwards(listener: BackwardListener) -> None:
    """Stops the notifications of a listener."""
    with _LOCK:
        _LISTENERS.discard(ref(listener))


def _telling(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def run_and_tell(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        began = next(_ORDER)
        leaves_gradients = kwargs.get("accumulate_grad") and current_task() == NO_TASK
        if leaves_gradients:
            _announce(outputs)
        try:
            return run(outputs, *args, **kwargs)
        except BaseException:
            if leaves_gradients:
                inputs = args[3] if len(args) > 3 else kwargs.get("inputs", ())
                _tell(FailedBackward(began, outputs, inputs or ()))
            raise

    run_and_tell.tells_of_backwards = True  # type: ignore[attr-defined]
    return untraced(run_and_tell)


# The loops over listeners are functions of their own, so that no local variable keeps a listener
# alive: not while the backward runs, which may wait for other sites, nor in an error's traceback.
def _announce(outputs: Sequence[Any]) -> None:
    for listener in _listeners():
        listener.on_backward(outputs)


def _tell(failed: FailedBackward) -> None:
    for listener in _listeners():
        listener.on_failed_backward(failed)


def _listeners() -> list[BackwardListener]:
    with _LOCK:
        return [listener for one in [*_LISTENERS] if (listener := one()) is not None]


def _nodes_of(ends: Iterable[Any]) -> list[Node]:
    edges = [get_gradient_edge(t) if _has_graph(t) else t for t in ends]
    return [edge.node for edge in edges if isinstance(edge, GradientEdge)]


def _has_graph(t: Any) -> bool:
    return isinstance(t, Tensor) and t.requires_grad
