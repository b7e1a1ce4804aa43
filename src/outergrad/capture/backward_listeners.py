"""Who hears of a backward before it begins, and if it raised, whatever it had reached.

Autograd tells hooks only of nodes that it has come to. What a backward does before it comes to one
that is watched, as one that raises in a loss of one's own, would be known to nobody. So the
function through which `torch.autograd` calls its engine has one of ours around it, from the first
distributed model on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from threading import Lock
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from outergrad.capture.engine import NO_TASK, current_task, untraced

_ORDER = itertools.count(1)
_LISTENERS: WeakSet[BackwardListener] = WeakSet()
_LOCK = Lock()


@dataclass(frozen=True)
class FailedBackward:
    """A backward, not one inside another, that was to leave gradients in parameters and raised.

    Attributes:
        began: its place in the order of `now`.
        outputs: what it was called for.
        inputs: in which it was to leave gradients; empty for all leaves.
    """

    began: int
    outputs: Sequence[Any]
    inputs: Sequence[Any]

    def nodes(self) -> set[Node]:
        """All nodes that it could have come to, and of `inputs` only these, where there are some.

        Walks the graph, which is there as long as the outputs are.
        """
        found, left = set[Node](), _nodes_of(self.outputs)
        while left:
            node = left.pop()
            if node not in found:
                found.add(node)
                left += [below for below, _ in node.next_functions if below is not None]
        return found & set(_nodes_of(self.inputs)) if self.inputs else found


class BackwardListener(Protocol):
    """Who is told of backwards that leave gradients in parameters, maybe of another model."""

    def on_backward(self) -> None:
        """A backward of this thread is about to begin; not one inside another."""
        ...

    def on_failed_backward(self, failed: FailedBackward) -> None:
        """A backward of this thread has raised."""
        ...


def now() -> int:
    """A number that is greater than all before it, in whichever thread."""
    return next(_ORDER)


def listen_to_backwards(listener: BackwardListener) -> None:
    """Tells it of every backward of this process, as long as it lives."""
    with _LOCK:
        _LISTENERS.add(listener)
        run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        if not hasattr(run, "tells_of_backwards"):
            torch.autograd._engine_run_backward = _telling(run)  # type: ignore[attr-defined]


def ignore_backwards(listener: BackwardListener) -> None:
    """Tells it nothing any more."""
    with _LOCK:
        _LISTENERS.discard(listener)


def _telling(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def run_and_tell(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        began = next(_ORDER)
        leaves_gradients = kwargs.get("accumulate_grad") and current_task() == NO_TASK
        if leaves_gradients:
            _announce()
        try:
            return run(outputs, *args, **kwargs)
        except BaseException:
            if leaves_gradients:
                inputs = args[3] if len(args) > 3 else kwargs.get("inputs", ())
                _tell(FailedBackward(began, outputs, inputs or ()))
            raise

    run_and_tell.tells_of_backwards = True  # type: ignore[attr-defined]
    return untraced(run_and_tell)


def _announce() -> None:
    """Apart, so that no listener is held while the backward runs: it may wait for other sites."""
    for listener in _listeners():
        listener.on_backward()


def _tell(failed: FailedBackward) -> None:
    """Apart, so that no listener is held by the traceback of an error."""
    for listener in _listeners():
        listener.on_failed_backward(failed)


def _listeners() -> list[BackwardListener]:
    with _LOCK:
        return list(_LISTENERS)


def _nodes_of(ends: Iterable[Any]) -> list[Node]:
    edges = [get_gradient_edge(t) if _has_graph(t) else t for t in ends]
    return [edge.node for edge in edges if isinstance(edge, GradientEdge)]


def _has_graph(t: Any) -> bool:
    return isinstance(t, Tensor) and t.requires_grad
