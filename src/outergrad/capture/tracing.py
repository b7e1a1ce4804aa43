"""Functions that are registered with torch.compile; imported late, as the import takes long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outergrad.capture.compiled import GraphTap


@torch.compiler.allow_in_graph
def tap_in_graph(y: Tensor, a: Tensor, key: int, slot: int, *params: Tensor) -> Tensor:
    """Applies `GraphTap`; dynamo puts the call into the graph, and AOTAutograd traces it."""
    return GraphTap.apply(y, a, key, slot, *params)  # type: ignore[return-value]


@torch.compiler.disable(
    reason="outergrad computes this module outside of graphs: a kind of layer that cannot be "
    "traced, a block of og.EDAD, or a part with joint=True; compile without fullgraph=True, "
    "see docs/compile.md"
)
def outside_graphs(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Calls a forward outside of the graph, which breaks there."""
    return forward(*args, **kwargs)


@torch.compiler.disable(
    reason="outergrad counts the steps of optimizers (og.LocalSteps, or replicas that are made "
    "equal with the optimizers' state), which a graph cannot; compile without fullgraph=True"
)
def step_outside_graphs(tell: Callable[[Any], None], optimizer: Any) -> None:
    """Reports an optimizer's step outside of the graph, which breaks there."""
    tell(optimizer)
