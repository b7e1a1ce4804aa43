"""Taps in the graphs of torch.compile: operators that it calls and does not look into.

A graph has no place for Python objects, and what autograd runs of it is one node, of which one
learns in its forward alone. So a tap in a graph is three operators with effects, which are neither
left out nor joined nor computed again: one tells in forward that rows were tapped, and by which
node their delta will come; one that rows were not; and one hands activations and delta on.
"""

from __future__ import annotations

import sys
from itertools import count
from types import CodeType
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from outergrad.capture.engine import untraced


class GraphSink(Protocol):
    """A layer that is told what happens to it in compiled graphs."""

    def on_graph_use(self, slot: int, node: Any, a: Tensor, dtype: torch.dtype) -> None:
        """A product of a was tapped in forward; a node of autograd will bring its delta."""
        ...

    def on_graph_rows(self, x: Tensor) -> None:
        """The layer's input passed in forward, and was not tapped."""
        ...

    def on_graph_delta(self, slot: int, a: Tensor, delta: Tensor) -> None:
        """A delta has arrived; both tensors are the graph's, which will write to them again."""
        ...


_sinks: WeakValueDictionary[int, GraphSink] = WeakValueDictionary()
_keys = count()


def key_of(sink: GraphSink) -> int:
    """What stands for a layer in graphs; it is not kept alive by it."""
    key = next(_keys)
    _sinks[key] = sink
    return key


def _live(key: int) -> GraphSink:
    sink = _sinks.get(key)
    if sink is None:
        raise RuntimeError(
            "a graph of torch.compile ran for a layer whose session is gone: call "
            "torch.compiler.reset() and compile the model again"
        )
    return sink


def _use(a: Tensor, key: int, slot: int, dtype: torch.dtype) -> None:
    _live(key).on_graph_use(slot, _node(), a, dtype)


def _rows(x: Tensor, key: int) -> None:
    _live(key).on_graph_rows(x)


def _delta(delta: Tensor, a: Tensor, key: int, slot: int) -> None:
    _live(key).on_graph_delta(slot, a, delta)


_library = torch.library.Library("outergrad", "DEF")
for _name, _arguments, _run in (
    ("use", "Tensor a, SymInt key, int slot, ScalarType dtype", _use),
    ("rows", "Tensor x, SymInt key", _rows),
    ("delta", "Tensor delta, Tensor a, SymInt key, int slot", _delta),
):
    _library.define(f"{_name}({_arguments}) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"outergrad::{_name}", lambda *_: None, lib=_library)
    _register_effectful_op(f"outergrad::{_name}", _EffectType.ORDERED)


class GraphTap(torch.autograd.Function):
    """The identity, as `Tap` is; the compiler keeps its operators, and nothing of it.

    It takes the parameters as inputs so that backward reaches them.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, a: Tensor, key: int, slot: int, *params: Tensor) -> Tensor:
        """Counts a use of the layer, and keeps a."""
        torch.ops.outergrad.use(a, key, slot, y.dtype)
        ctx.save_for_backward(a)
        ctx.place = key, slot
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @untraced
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Any, ...]:
        """Hands (a, delta) to the layer; the delta goes on."""
        torch.ops.outergrad.delta(deltas[0], ctx.saved_tensors[0], *ctx.place)
        return deltas[0], *(None for _ in ctx.needs_input_grad[1:])


def _node() -> Any:
    """The node of autograd whose forward runs: of the compiled graph, or of the tap itself.

    It is the context of that forward, which is all that there is of it so far.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if _is_forward(frame.f_code):
            return frame.f_locals["ctx"]
        frame = frame.f_back
    return None


def _is_forward(code: CodeType) -> bool:
    if code is GraphTap.forward.__code__:
        return True
    return code.co_name == "forward" and code.co_filename.endswith("runtime_wrappers.py")
