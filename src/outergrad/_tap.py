"""Every reliance on autograd's inside: taps, the ready event, the finaliser, their refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from outergrad._held_hooks import HookedClaim
from outergrad._untraced import untraced

NO_TASK = -1
_REENTRANT = (
    "a backward runs inside another one, as with checkpoint(use_reentrant=True); "
    "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
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

    def capture(self, ctx: Any, use: Any, deltas: Sequence[Tensor]) -> None:
        """Takes the deltas of one use."""
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


def refuse_nested_backward() -> None:
    """Checks that the current backward was not started by the backward of a custom function.

    Raises:
        RuntimeError: it was, as in reentrant checkpointing: parameters would be "ready" once per
            checkpoint, and the sites would exchange parts of a step.
    """
    inner, frame = None, sys._getframe()
    while frame is not None:
        runs_function = frame.f_code is BackwardCFunction.apply.__code__
        if runs_function and inner not in OURS and not _is_compiled(inner):
            raise RuntimeError(_REENTRANT)
        inner, frame = frame.f_code, frame.f_back


def refuse_checkpoint_backward() -> None:
    """Checks that no checkpoint's own backward runs: it would be taken for the whole one.

    FSDP2 calls hooks from within custom functions, so that `refuse_nested_backward` is of no use.

    Raises:
        RuntimeError: it is a reentrant checkpoint's.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            raise RuntimeError(_REENTRANT)
        frame = frame.f_back


def _is_compiled(code: CodeType | None) -> bool:
    """Whether it is the backward of a graph of torch.compile."""
    return code is not None and code.co_filename.endswith("_aot_autograd/runtime_wrappers.py")


class Tap(torch.autograd.Function):
    """The identity; keeps a and, in backward, hands (a, delta) on instead of a weight gradient.

    It takes the parameters as inputs so that backward reaches them, and marks y dirty instead of
    copying it, so that an in-place operation may follow.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, a: Tensor, layer: Any, slot: int, *params: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        ctx.layer, ctx.slot, ctx.born_in = layer, slot, current_task()
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @untraced
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Any, ...]:
        ctx.layer.capture(ctx, ctx.slot, deltas[0])
        return deltas[0], *(None for _ in ctx.needs_input_grad[1:])


class BlockTap(torch.autograd.Function):
    """The identity of a use's outputs; in backward hands their deltas on.

    It takes the parameters as inputs so that backward reaches them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        block: Capturing,
        use: Any,
        saved: Sequence[Tensor],
        count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*saved)
        ctx.block, ctx.use, ctx.born_in = block, use, current_task()
        # Copies, because an output may be a view, or saved by what made it.
        return tuple(t.clone() for t in tensors[:count])

    @staticmethod
    @untraced
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Any, ...]:
        ctx.block.capture(ctx, ctx.use, deltas)
        parameters = len(ctx.needs_input_grad) - 4 - len(deltas)
        return None, None, None, None, *deltas, *[None] * parameters


class DeltaTap(torch.autograd.Function):
    """The identity; in backward another delta goes on than the one that arrived."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, instead: Callable[[Any, Tensor], Tensor]) -> Tensor:
        ctx.instead = instead
        return y.clone()

    @staticmethod
    @untraced
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Any, ...]:
        return ctx.instead(ctx, deltas[0]), None


OURS = {Tap.backward.__code__, BlockTap.backward.__code__, DeltaTap.backward.__code__}


class WatchedParameter(HookedClaim):
    """A trainable parameter: its accumulator node and the hooks that report to a sink."""

    def __init__(self, name: str, parameter: nn.Parameter, sink: ParameterSink) -> None:
        self.name, self.parameter, self._sink = name, parameter, sink
        self.dtype = parameter.dtype
        self.node: Node = get_gradient_edge(parameter).node
        super().__init__(parameter, sink)

    def accumulates(self) -> bool:
        """Whether the current backward leaves a gradient in the parameter.

        Raises:
            RuntimeError: it is returned by `torch.autograd.grad` instead.
        """
        try:
            return will_run(self.node)
        except RuntimeError:
            raise RuntimeError(
                f"torch.autograd.grad of parameter {self.name!r} would return this site's "
                f"gradient alone; use loss.backward() and .grad, or session.detach() first"
            ) from None

    def tappable(self) -> bool:
        """Whether it is trained and nobody else has a hook that wants the local gradient."""
        hooks = self.parameter._backward_hooks
        return self.parameter.requires_grad and hooks is not None and len(hooks) == 1

    @untraced
    def _before(self, gradient: Tensor | None) -> None:
        """Called whenever backward reaches the parameter; None if only taps feed it."""
        if not self.accumulates():
            self._sink.on_stale(self.name)
        if torch.is_grad_enabled():
            raise RuntimeError(_double_backward(self.name))
        self.hooks.hold()
        if gradient is not None:
            self._sink.on_gradient(self.name)

    @untraced
    def _after(self, _: Tensor) -> None:
        self._sink.on_ready(self.name)


def _double_backward(name: str) -> str:
    return (
        f"{name!r}: backward(create_graph=True) cannot be shared between sites: the gradients of "
        f"the other sites have no graph here; call session.detach() for double backward"
    )


def is_shared(born_in: int, watched: Sequence[WatchedParameter]) -> bool:
    """Whether this backward leaves gradients in the parameters of what was tapped.

    Args:
        born_in: the backward in which it was tapped, or NO_TASK.
        watched: the parameters.

    Raises:
        RuntimeError: for double backward, reentrant checkpointing and autograd.grad on weights.
    """
    accumulates = [p.accumulates() for p in watched]
    if torch.is_grad_enabled():
        raise RuntimeError(_double_backward(watched[0].name))
    if born_in != NO_TASK:
        raise RuntimeError(_REENTRANT)
    return any(accumulates)  # or gradients of inputs alone were asked for
