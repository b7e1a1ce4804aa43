"""Parameters that a session watches: their accumulator nodes, hooks, and places in the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, reduce
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from outergrad.capture.claims import HookedClaim, ReadyHook
from outergrad.capture.engine import NO_TASK, current_task, is_nested, untraced, will_run
from outergrad.capture.untappable import in_functional_call

_BY_CLONES = (
    "differentiate by clones: torch.func.functional_call(model, {n: p.clone() for n, p in "
    "model.named_parameters()}, inputs) and torch.autograd.grad of these"
)
_will_run = torch._C._will_engine_execute_node


NO_GRADIENT = (0, 0)
"""State of a `param.grad` that is None."""


class ParameterSink(Protocol):
    """Receives the events of parameters, in their order.

    Once a backward has begun, what it reaches is known, and the step takes events directly: the
    calls between would be most of what an event costs.

    Attributes:
        direct_task: id of the backward whose step takes events directly.
        direct: parameters in which that backward leaves a gradient.
        on_direct_gradient: called in that backward instead of `on_gradient`.
        on_direct_ready: called in that backward instead of `on_ready`.
        meets_hooks: set to True when a backward reaches a parameter that has hooks of others.
    """

    direct_task: int
    direct: Collection[str]
    on_direct_gradient: Callable[[str], None]
    on_direct_ready: Callable[[str], object]
    meets_hooks: bool

    def on_gradient(self, name: str) -> None:
        """Called when autograd itself has a gradient for the parameter."""
        ...

    def on_written(self, name: str) -> None:
        """Called when a backward has written to `param.grad` itself and returned no gradient."""
        ...

    def on_ready(self, name: str) -> None:
        """Called when this backward has accumulated all it has for the parameter."""
        ...

    def on_stale(self, name: str) -> None:
        """Called when a gradient has arrived by another accumulator node than the watched one."""
        ...


class _DirectHook(ReadyHook):
    """The hook of a watched parameter, which runs for every parameter of every backward."""

    @untraced
    def __call__(self, _: Tensor) -> None:
        watched = self._claim()
        if watched is None:
            return
        sink, name = watched._sink, watched.name
        if sink.direct_task == current_task() and name in sink.direct:
            sink.on_direct_ready(name)
        else:
            watched._ready()


class WatchedParameter(HookedClaim):
    """A trainable parameter: its accumulator node and the hooks that report to a sink."""

    ready_hook = _DirectHook

    def __init__(self, name: str, parameter: nn.Parameter, sink: ParameterSink) -> None:
        self.name, self.parameter, self._sink = name, parameter, sink
        self.dtype = parameter.dtype
        self._node: Node | None = get_gradient_edge(parameter).node
        self.marked: tuple[int, int] | None = None
        """State of `param.grad` when the backward began; None before the first backward."""
        super().__init__(parameter, sink, partial(sink.on_ready, name))

    @property
    def node(self) -> Node | None:
        """The accumulator node: the one that is held, or else the current one; None if frozen."""
        held = self._node
        if held is None and self.parameter.requires_grad:
            return get_gradient_edge(self.parameter).node
        return held

    def remove(self) -> None:
        """Removes the hooks, and drops the node, as it stores a shape that may change."""
        super().remove()
        self.let_go()

    def _hold(self, node: Node | None) -> None:
        if node is not self._node:
            self._node = node
            self.hooks.follow_node()

    def let_go(self) -> None:
        """Drops the node; it is looked up on demand until one is held again."""
        self._node = None

    def accumulates(self) -> bool:
        """True if the current backward leaves a gradient in the parameter; raises as `reached`."""
        return bool(self.reached())

    def reached(self) -> bool | None:
        """True if the current backward leaves a gradient in the parameter.

        None if the backward was started by `torch.autograd.grad` in another backward, to which it
        returns the gradient.

        Raises:
            RuntimeError: the gradient is returned, but not to another backward.
        """
        try:
            held = self._node
            return will_run(self.node if held is None else held)
        except RuntimeError:
            if is_nested():
                return None
            raise RuntimeError(
                f"torch.autograd.grad of parameter {self.name!r} would return this site's "
                f"gradient alone; use loss.backward() and .grad, or {_BY_CLONES}"
            ) from None

    def tappable(self) -> bool:
        """True if the parameter is trained and no hook of others wants the local gradient."""
        hooks = self.parameter._backward_hooks
        return self.parameter.requires_grad and hooks is not None and len(hooks) == 1

    @untraced
    def _before(self, gradient: Tensor | None) -> None:
        """Called when a backward reaches the parameter, with None if only taps feed it."""
        sink, p, name = self._sink, self.parameter, self.name
        if self._node is None:  # let go of; a node that is there since may have hooks of others
            self._hold(get_gradient_edge(p).node)
        directly = sink.direct_task == current_task() and name in sink.direct
        if not directly and not self._is_accumulated():
            return
        if torch.is_grad_enabled():
            raise RuntimeError(_double_backward(name))
        own = p._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if len(own) > 1 or self.hooks.of_node:  # as in `with_any`
            sink.meets_hooks = True
            self.hooks.hold()
        if gradient is not None:
            (sink.on_direct_gradient if directly else sink.on_gradient)(name)
        elif p.grad is not None and self._is_written():
            sink.on_written(name)

    def state_of_grad(self) -> tuple[int, int]:
        """Returns the id of the tensor `param.grad` and its version counter."""
        grad = self.parameter.grad
        return NO_GRADIENT if grad is None else (id(grad), grad._version)

    def _is_written(self) -> bool:
        return self.marked is not None and self.marked != self.state_of_grad()

    def _is_accumulated(self) -> bool:
        """True if the gradient is accumulated, False if it is returned to another backward."""
        try:
            held = self._node
            runs = held is not None and _will_run(held)
        except RuntimeError:
            runs = False
        if not runs:
            reached = self.reached()
            if reached is None:
                return False
            if not reached:
                self._sink.on_stale(self.name)
        return True


def _double_backward(name: str) -> str:
    return (
        f"{name!r}: backward(create_graph=True) cannot be shared between sites: the gradients of "
        f"the other sites have no graph here; gradients of inputs may be part of the loss by "
        f"torch.autograd.grad(..., inputs, create_graph=True); for those of weights, {_BY_CLONES}"
    )


def hold_again(watched: Collection[WatchedParameter]) -> list[Node | None]:
    """Makes parameters hold their current accumulator nodes, and returns these."""
    nodes = accumulators([one.parameter for one in watched])
    for one, node in zip(watched, nodes, strict=True):
        one._hold(node)
    return nodes


class _Edges(torch.autograd.Function):
    """Function whose only use is that its node refers to the nodes of its inputs."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        return torch.empty(())


def accumulators(params: Sequence[nn.Parameter]) -> list[Node | None]:
    """Returns the accumulator node of each parameter, None for frozen ones."""
    with torch.enable_grad():
        node = _Edges.apply(*params).grad_fn
    return [None] * len(params) if node is None else list(map(itemgetter(0), node.next_functions))


def accumulating(watched: Mapping[str, WatchedParameter]) -> set[str]:
    """Returns names of parameters that this backward gives a gradient; raises as `reached`."""
    found = set(watched)
    try:
        rest = [p for p in watched.values() if (n := p._node) is None or not _will_run(n)]
        found.difference_update([p.name for p in rest if not p.accumulates()] if rest else ())
    except RuntimeError:  # one gradient is returned: ask each by itself, which names it
        return {name for name, p in watched.items() if p.accumulates()}
    return found


def is_shared(born_in: int, watched: Sequence[WatchedParameter]) -> bool:
    """True if this backward leaves gradients in the parameters of a product tapped in a forward.

    False if only gradients of inputs were requested, or gradients of parameters by the backward of
    a custom function. False also if the product was tapped in a backward: no header could have
    announced its rows.

    Args:
        born_in: id of the backward in which the product was tapped, or NO_TASK.
        watched: the product's parameters.

    Raises:
        RuntimeError: for backward(create_graph=True) and autograd.grad on weights.
    """
    for p in watched:
        sink = p._sink  # which knows what the backward leaves, unless this is its first event
        if sink.direct_task != current_task() or p.name not in sink.direct:
            accumulating = [p for p in watched if p.accumulates()]
            break
    else:
        accumulating = watched
    if accumulating and torch.is_grad_enabled():
        raise RuntimeError(_double_backward(accumulating[0].name))
    return bool(accumulating) and born_in == NO_TASK


def is_wanted(born_in: int, p: WatchedParameter) -> bool:
    """True if autograd needs a parameter's local gradient from its tap.

    A custom function's backward requests it, or the product was tapped in a backward.
    """
    reached = p.reached()
    return reached is None or (born_in != NO_TASK and reached)


class OwnParameters:
    """The trained parameters of some modules, and their places when the model was distributed.

    Args:
        modules: the modules.
        watched: the trained parameters of these modules.
    """

    def __init__(self, modules: Iterable[nn.Module], watched: Iterable[WatchedParameter]) -> None:
        places = {
            id(p): (module, name.split("."))
            for module in modules
            for name, p in module.named_parameters()
        }
        self._places = [(w, *places[id(w.parameter)]) for w in watched]

    def are_there(self) -> bool:
        """True if all are in their places; False if a caller passes others (functional_call).

        Raises:
            RuntimeError: a parameter was replaced or converted after `distribute`.
        """
        for watched, module, path in self._places:
            found = reduce(_child, path, module)
            if found is watched.parameter and found.dtype == watched.dtype:
                continue
            compiles = torch.compiler.is_dynamo_compiling()  # which cannot trace a stack walk
            passed = not compiles and in_functional_call()
            if not passed and (found is None or isinstance(found, nn.Parameter)):
                raise RuntimeError(
                    f"{watched.name!r} was replaced or converted after og.distribute(): call "
                    f"session.detach(), convert or load, and distribute again on every site"
                )
            return False
        return True


def _child(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)
