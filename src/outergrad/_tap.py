"""Every reliance on autograd's inside: taps, the ready event, the finaliser, their refusals."""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from outergrad._protocols import Rule
from outergrad._types import Call, Factors, Slot

NO_TASK = -1
_REENTRANT = (
    "a backward runs inside another one, as with checkpoint(use_reentrant=True); "
    "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


class Sink(Protocol):
    """Who is told what happens in backward, in the order in which it happens."""

    def taps(self, layer: TappedLayer) -> bool:
        """Whether the layer's products should be tapped in this forward."""
        ...

    def on_factors(self, slot: Slot, factors: Callable[[], Factors]) -> None:
        """A product's delta has arrived; its rows can be computed at any later time."""
        ...

    def on_gradient(self, name: str) -> None:
        """Autograd itself has a gradient for the parameter."""
        ...

    def on_ready(self, name: str) -> None:
        """Everything that this backward has for the parameter is there."""
        ...


class Capturing(Protocol):
    """Who is told of a block's deltas."""

    def capture(self, ctx: Any, use: Any, deltas: Sequence[Tensor]) -> None:
        """Takes the deltas of one use."""
        ...


def current_task() -> int:
    """Identity of the backward that runs in this thread, or NO_TASK."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs callback when the current backward has succeeded, before it returns."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def refuse_nested_backward() -> None:
    """Checks that the current backward was not started by the backward of a custom function.

    Raises:
        RuntimeError: it was, as in reentrant checkpointing: parameters would be "ready" once per
            checkpoint, and the sites would exchange parts of a step.
    """
    inner, frame = None, sys._getframe()
    while frame is not None:
        runs_function = frame.f_code is BackwardCFunction.apply.__code__
        if runs_function and inner not in _OURS:
            raise RuntimeError(_REENTRANT)
        inner, frame = frame.f_code, frame.f_back


class Tap(torch.autograd.Function):
    """The identity; keeps a and, in backward, hands (a, delta) on instead of a weight gradient.

    It takes the parameters as inputs so that backward reaches them, and marks y dirty instead of
    copying it, so that an in-place operation may follow.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, a: Tensor, layer: TappedLayer, slot: int, *params: Tensor
    ) -> Tensor:
        ctx.save_for_backward(a)
        ctx.layer, ctx.slot, ctx.born_in = layer, slot, current_task()
        ctx.mark_dirty(y)
        return y

    @staticmethod
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
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Any, ...]:
        return ctx.instead(ctx, deltas[0]), None


_OURS = {Tap.backward.__code__, BlockTap.backward.__code__, DeltaTap.backward.__code__}


class WatchedParameter:
    """A trainable parameter: its accumulator node and the hooks that report to a sink."""

    def __init__(self, name: str, parameter: nn.Parameter, sink: Sink) -> None:
        self.name, self.parameter, self._sink = name, parameter, sink
        self.dtype = parameter.dtype
        self.node: Node = get_gradient_edge(parameter).node
        self._handles: list[RemovableHandle] = [
            parameter.register_hook(self._before),
            parameter.register_post_accumulate_grad_hook(self._after),
        ]

    def accumulates(self) -> bool:
        """Whether the current backward leaves a gradient in the parameter.

        Raises:
            RuntimeError: it is returned by `torch.autograd.grad` instead.
        """
        try:
            return torch._C._will_engine_execute_node(self.node)
        except RuntimeError:
            raise RuntimeError(
                f"torch.autograd.grad of parameter {self.name!r} would return this site's "
                f"gradient alone; use loss.backward() and .grad, or session.detach() first"
            ) from None

    def tappable(self) -> bool:
        """Whether it is trained and nobody else has a hook that wants the local gradient."""
        hooks = self.parameter._backward_hooks
        return self.parameter.requires_grad and hooks is not None and len(hooks) == 1

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _before(self, gradient: Tensor | None) -> None:
        """Called whenever backward reaches the parameter; None if only taps feed it."""
        self.accumulates()
        if torch.is_grad_enabled():
            raise RuntimeError(_double_backward(self.name))
        if gradient is not None:
            self._sink.on_gradient(self.name)

    def _after(self, _: Tensor) -> None:
        self._sink.on_ready(self.name)


class TappedLayer:
    """A module whose class was swapped for one that computes through taps."""

    def __init__(
        self,
        module: nn.Module,
        rule: Rule,
        slots: Sequence[Slot],
        watched: Sequence[Sequence[WatchedParameter]],
        sink: Sink,
    ) -> None:
        self.module, self.rule, self.slots = module, rule, tuple(slots)
        self._watched = [tuple(params) for params in watched]
        self._sink = sink
        self._live: list[WeakKeyDictionary[Any, tuple[int, torch.dtype]]] = [
            WeakKeyDictionary() for _ in slots
        ]
        self._untapped = [0] * len(self.slots)
        self._decided = False
        own = {id(p): name.split(".") for name, p in module.named_parameters()}
        self._places = {p.name: own[id(p.parameter)] for params in watched for p in params}
        self._swap = ClassSwap(module, self._forward)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.active():
            return self.rule.forward(self.module, self.tap, *args, **kwargs)
        if torch.is_grad_enabled():
            self.note_untapped(args, kwargs)
        return self._swap.plain_forward(*args, **kwargs)

    def restore(self) -> None:
        """Gives the module its own class back."""
        self._swap.restore()

    def active(self) -> bool:
        """Whether this forward goes through taps; a recomputation does what the forward did."""
        if not torch.is_grad_enabled():
            return False
        if current_task() == NO_TASK:
            watched = [p for params in self._watched for p in params]
            self._decided = self._sink.taps(self) and all(p.tappable() for p in watched)
        return self._decided and self._has_own_parameters()

    def _has_own_parameters(self) -> bool:
        """Whether the module still has the parameters that are watched.

        Raises:
            RuntimeError: they were replaced or converted after `distribute`.
        """
        for params in self._watched:
            for watched in params:
                found = self._find(watched.name)
                if found is watched.parameter and found.dtype == watched.dtype:
                    continue
                if isinstance(found, nn.Parameter):
                    raise RuntimeError(
                        f"{watched.name!r} was replaced or converted after og.distribute(): call "
                        f"session.detach(), convert or load, and distribute again on every site"
                    )
                return False  # somebody passes weights of their own (functional_call)
        return True

    def _find(self, name: str) -> Any:
        *path, last = self._places[name]
        owner = self.module
        for child in path:
            owner = getattr(owner, child)
        return getattr(owner, last)

    def tap(self, y: Tensor, a: Tensor, slot: int = 0, rows: int | None = None) -> Tensor:
        """Implements `TapFn` for this layer."""
        slot %= len(self.slots)
        here = self.slots[slot]
        if rows is None:
            rows = y.numel() // max(here.groups * here.outputs, 1)
        params = [p.parameter for p in self._watched[slot]]
        tapped: Tensor = Tap.apply(y, a, self, slot, *params)  # type: ignore[assignment]
        if current_task() == NO_TASK:  # in a recomputation only the saved tensors count
            self._live[slot][tapped.grad_fn] = rows, tapped.dtype
        return tapped

    def note_untapped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Counts rows of a forward without taps: the next plan may want them as factors."""
        if not any(p.parameter.requires_grad for params in self._watched for p in params):
            return
        for slot, rows in enumerate(self.rule.rows(self.module, args, kwargs)):
            self._untapped[slot] += rows

    def forget_untapped(self) -> None:
        """Starts counting anew."""
        self._untapped = [0] * len(self.slots)

    def announced(self, slot: int) -> tuple[int, int, torch.dtype]:
        """Rows that the current backward will capture, that passed untapped, and their dtype."""
        runs, live = torch._C._will_engine_execute_node, self._live[slot]
        uses = [use for node, use in live.items() if runs(node)]
        if not any(watched.accumulates() for watched in self._watched[slot]):
            uses = []
        dtype = reduce(torch.promote_types, (dtype for _, dtype in uses)) if uses else torch.float32
        return sum(rows for rows, _ in uses), self._untapped[slot], dtype

    def capture(self, ctx: Any, slot: int, delta: Tensor) -> None:
        """Takes the delta of one use of a slot.

        Raises:
            RuntimeError: for double backward, reentrant checkpointing and autograd.grad on weights.
        """
        if not is_shared(ctx, self._watched[slot]):
            return
        call = Call(ctx.saved_tensors[0], delta)
        self._sink.on_factors(self.slots[slot], lambda: self.rule.factors(self.module, slot, call))


def _double_backward(name: str) -> str:
    return (
        f"{name!r}: backward(create_graph=True) cannot be shared between sites: the gradients of "
        f"the other sites have no graph here; call session.detach() for double backward"
    )


def is_shared(ctx: Any, watched: Sequence[WatchedParameter]) -> bool:
    """Whether this backward leaves gradients in the parameters of what was tapped.

    Raises:
        RuntimeError: for double backward, reentrant checkpointing and autograd.grad on weights.
    """
    accumulates = [p.accumulates() for p in watched]
    if torch.is_grad_enabled():
        raise RuntimeError(_double_backward(watched[0].name))
    if ctx.born_in != NO_TASK:
        raise RuntimeError(_REENTRANT)
    return any(accumulates)  # or gradients of inputs alone were asked for


class ClassSwap:
    """Gives one module a subclass of its class, of the same name, with another forward.

    All else lives in the subclass's forward, not in the module: state_dict, `vars(module)`, copies
    and pickles are those of the plain module.

    Args:
        module: the module.
        forward: what to call in place of its own forward.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module, self._plain = module, type(module)
        module.__class__ = _subclass(self._plain, module, forward)

    def plain_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self._plain.forward(self._module, *args, **kwargs)

    def restore(self) -> None:
        """Gives the module its own class back."""
        self._module.__class__ = self._plain


def _subclass(
    plain: type[nn.Module], module: nn.Module, instead: Callable[..., Any]
) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is module:
            return instead(*args, **kwargs)
        return plain.forward(self, *args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: int) -> Any:  # noqa: N807
        _, _, *state = plain.__reduce_ex__(self, protocol)  # type: ignore[misc]
        return copyreg._reconstructor, (plain, object, None), *state  # type: ignore[attr-defined]

    body = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
    }
    return type(plain.__name__, (plain,), body)


def is_watched(p: nn.Parameter) -> bool:
    """Whether the parameter belongs to a session."""
    hooks = (p._backward_hooks or {}).values()
    return any(isinstance(getattr(hook, "__self__", None), WatchedParameter) for hook in hooks)
