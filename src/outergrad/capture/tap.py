"""Every reliance on autograd's inside: taps, the ready event, the finaliser, their refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from outergrad.capture.held_hooks import HookedClaim
from outergrad.capture.nested import is_nested
from outergrad.capture.untraced import untraced

NO_TASK = -1
_BY_CLONES = (
    "differentiate by clones: torch.func.functional_call(model, {n: p.clone() for n, p in "
    "model.named_parameters()}, inputs) and torch.autograd.grad of these"
)
_JOINT = (
    "joint=True: the mean of the sites' deltas is neither differentiated (create_graph=True) nor "
    "taken in a backward inside another one (a checkpoint with use_reentrant=True, a custom "
    "function that differentiates): use og.PerLayer(..., joint=False), or leave that out"
)


class ParameterSink(Protocol):
    """Who is told what happens to parameters, in the order in which it happens."""

    def on_gradient(self, name: str) -> None:
        """Autograd itself has a gradient for the parameter."""
        ...

    def on_ready(self, name: str) -> None:
        """Everything that this backward has for the parameter is there."""
        ...

    def on_stale(self, name: str) -> None:
        """A gradient for the parameter has come by another node than the one that was watched."""
        ...


class Capturing(Protocol):
    """Who is told of a block's deltas."""

    def capture(self, ctx: Any, use: Any, deltas: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Takes the deltas of one use; returns what autograd gets for the tensors of its tap."""
        ...


def current_task() -> int:
    """Identity of the backward that runs in this thread, or NO_TASK."""
    return torch._C._current_graph_task_id()


def will_run(node: Any) -> bool:
    """Whether the current backward reaches a node; not if that is None, because it is gone.

    Raises:
        RuntimeError: it is a parameter's, and `torch.autograd.grad` returns its gradient instead.
    """
    if node is None:
        return False
    if torch._C._will_engine_execute_node(node):
        return True
    return node is torch._C._current_autograd_node()  # where a backward starts, torch forgets it


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs callback when the current backward has succeeded, before it returns."""
    torch.autograd.Variable._execution_engine.queue_callback(untraced(callback))  # type: ignore[attr-defined]


class Tap(torch.autograd.Function):
    """The identity; keeps a and, in backward, hands (a, delta) on instead of a weight gradient.

    Where autograd itself needs a gradient of a or of the parameters, it gets it (`_returned.py`).
    It takes the parameters as inputs so that backward reaches them, and marks y dirty instead of
    copying it, so that an in-place operation may follow.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, a: Tensor, layer: Any, slot: int, *params: Tensor) -> Tensor:
        """Keeps a, and returns y itself."""
        ctx.save_for_backward(a)
        ctx.layer, ctx.slot, ctx.born_in = layer, slot, current_task()
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @untraced
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Any, ...]:
        """Hands (a, delta) to the layer; the delta goes on."""
        of_a, *of_params = ctx.layer.capture(ctx, ctx.slot, deltas[0])
        return deltas[0], of_a, None, None, *of_params


class BlockTap(torch.autograd.Function):
    """The identity of a use's outputs; in backward hands their deltas on.

    It takes the parameters as inputs so that backward reaches them, and what the use read, for
    where autograd itself needs its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        block: Capturing,
        use: Any,
        counts: tuple[int, int],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Keeps what the use read, and returns copies of its outputs."""
        outputs, read = counts
        ctx.save_for_backward(*tensors[outputs : outputs + read])
        ctx.block, ctx.use, ctx.born_in = block, use, current_task()
        # Copies, because an output may be a view, or saved by what made it.
        return tuple(t.clone() for t in tensors[:outputs])

    @staticmethod
    @untraced
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Any, ...]:
        """Hands the deltas of the outputs to the block."""
        return None, None, None, *ctx.block.capture(ctx, ctx.use, deltas)


class DeltaTap(torch.autograd.Function):
    """The identity; in backward another delta goes on than the one that arrived."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, instead: Callable[[Any, Tensor], Tensor]) -> Tensor:
        """Returns a copy of y."""
        ctx.instead = instead
        return y.clone()

    @staticmethod
    @untraced
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Any, ...]:
        """Lets `instead` say which delta goes on."""
        if torch.is_grad_enabled() or is_nested():
            raise RuntimeError(_JOINT)
        return ctx.instead(ctx, deltas[0]), None


class WatchedParameter(HookedClaim):
    """A trainable parameter: its accumulator node and the hooks that report to a sink."""

    def __init__(self, name: str, parameter: nn.Parameter, sink: ParameterSink) -> None:
        self.name, self.parameter, self._sink = name, parameter, sink
        self.dtype = parameter.dtype
        self._node: Node | None = get_gradient_edge(parameter).node
        super().__init__(parameter, sink, partial(sink.on_ready, name))

    @property
    def node(self) -> Node | None:
        """Which accumulates its gradient: the one of then, or, after `remove`, that of now."""
        if self._node is None and self.parameter.requires_grad:
            return get_gradient_edge(self.parameter).node
        return self._node

    def remove(self) -> None:
        """Takes the hooks away, and lets go of the node, which knows a shape that may change."""
        super().remove()
        self._node = None

    def accumulates(self) -> bool:
        """Whether the current backward leaves a gradient in the parameter.

        Raises:
            RuntimeError: `torch.autograd.grad` returns it instead, and not to another backward.
        """
        try:
            return will_run(self.node)
        except RuntimeError:
            self._refuse_at_top()
            return False

    def is_returned(self) -> bool:
        """Whether it is returned to another backward, which called `torch.autograd.grad`.

        Raises:
            RuntimeError: it is returned, but not to another backward.
        """
        try:
            will_run(self.node)
        except RuntimeError:
            self._refuse_at_top()
            return True
        return False

    def _refuse_at_top(self) -> None:
        if not is_nested():
            raise RuntimeError(
                f"torch.autograd.grad of parameter {self.name!r} would return this site's "
                f"gradient alone; use loss.backward() and .grad, or {_BY_CLONES}"
            ) from None

    def tappable(self) -> bool:
        """Whether it is trained and nobody else has a hook that wants the local gradient."""
        hooks = self.parameter._backward_hooks
        return self.parameter.requires_grad and hooks is not None and len(hooks) == 1

    @untraced
    def _before(self, gradient: Tensor | None) -> None:
        """Called whenever backward reaches the parameter; None if only taps feed it."""
        if self.is_returned():
            return
        if not self.accumulates():
            self._sink.on_stale(self.name)
        if torch.is_grad_enabled():
            raise RuntimeError(_double_backward(self.name))
        self.hooks.hold()
        if gradient is not None:
            self._sink.on_gradient(self.name)


def _double_backward(name: str) -> str:
    return (
        f"{name!r}: backward(create_graph=True) cannot be shared between sites: the gradients of "
        f"the other sites have no graph here; gradients of inputs may be part of the loss by "
        f"torch.autograd.grad(..., inputs, create_graph=True); for those of weights, {_BY_CLONES}"
    )


def is_shared(born_in: int, watched: Sequence[WatchedParameter]) -> bool:
    """Whether this backward leaves gradients in the parameters of what was tapped in a forward.

    Not where gradients of inputs alone were asked for, or of parameters by the backward of a
    custom function, nor where it was tapped in a backward, of which no header could tell.

    Args:
        born_in: the backward in which it was tapped, or NO_TASK.
        watched: the parameters.

    Raises:
        RuntimeError: for backward(create_graph=True) and autograd.grad on weights.
    """
    accumulating = [p for p in watched if p.accumulates()]
    if accumulating and torch.is_grad_enabled():
        raise RuntimeError(_double_backward(accumulating[0].name))
    return bool(accumulating) and born_in == NO_TASK
