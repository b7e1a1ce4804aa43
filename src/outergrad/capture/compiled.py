"""Taps in graphs of torch.compile: opaque operators with side effects.

A graph cannot contain Python objects. Autograd runs it as one node, which is accessible only during
its forward. So a tap in a graph consists of operators with effects, which the compiler neither
removes, merges nor recomputes. `use` reports in forward that rows were tapped, and the node that
will deliver their delta. `rows` reports rows that were not tapped. `delta` passes activations and
delta to the layer in backward.
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
    """A layer that receives the events of its compiled graphs."""

    def on_graph_use(self, slot: int, node: Any, a: Tensor, dtype: torch.dtype) -> None:
        """Called in forward when a product of a was tapped; the node will deliver its delta."""
        ...

    def on_graph_rows(self, x: Tensor) -> None:
        """Called in forward with the layer's input when it was not tapped."""
        ...

    def on_graph_delta(self, slot: int, a: Tensor, delta: Tensor) -> None:
        """Called in backward with a delta; the graph will overwrite the memory of both tensors."""
        ...


_sinks: WeakValueDictionary[int, GraphSink] = WeakValueDictionary()
_keys = count()


def key_of(sink: GraphSink) -> int:
    """Returns a number that stands for a layer in graphs; the layer is held weakly."""
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
    """The identity, like `Tap`; the compiled graph contains only the operators that it calls.

    The parameters are inputs so that backward reaches them.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, a: Tensor, key: int, slot: int, *params: Tensor) -> Tensor:
        """Reports a use of the layer and saves a."""
        torch.ops.outergrad.use(a, key, slot, y.dtype)
        ctx.save_for_backward(a)
        ctx.place = key, slot
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @untraced
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Any, ...]:
        """Passes (a, delta) to the layer, and returns the delta."""
        torch.ops.outergrad.delta(deltas[0], ctx.saved_tensors[0], *ctx.place)
        return deltas[0], *(None for _ in ctx.needs_input_grad[1:])


def _node() -> Any:
    """Returns the autograd node whose forward runs: the compiled graph's, or the tap's.

    No tensor refers to the node yet, so it is found as the context of that forward on the stack.
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
    # AOTAutograd's CompiledFunction
    return code.co_name == "forward" and code.co_filename.endswith("runtime_wrappers.py")
