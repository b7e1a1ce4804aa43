"""What torch.compile is told of our functions; imported by what it traces, since it takes long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outergrad.capture.compiled import GraphTap


@torch.compiler.allow_in_graph
def tap_in_graph(y: Tensor, a: Tensor, key: int, slot: int, *params: Tensor) -> Tensor:
    """As `Tap.apply`; part of the graph, and traced by autograd alone."""
    return GraphTap.apply(y, a, key, slot, *params)  # type: ignore[return-value]


@torch.compiler.disable(
    reason="outergrad computes this module outside of graphs: a kind of layer that cannot be "
    "traced, a block of og.EDAD, or a part with joint=True; compile without fullgraph=True, "
    "see docs/compile.md"
)
def outside_graphs(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Calls a forward, which breaks the graph."""
    return forward(*args, **kwargs)


@torch.compiler.disable(
    reason="outergrad counts the steps of optimizers (og.LocalSteps, or replicas that are made "
    "equal with the optimizers' state), which a graph cannot; compile without fullgraph=True"
)
def step_outside_graphs(tell: Callable[[Any], None], optimizer: Any) -> None:
    """Tells of a step of an optimizer, which breaks the graph."""
    tell(optimizer)
