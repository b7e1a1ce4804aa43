"""Parameters that a session watches: their nodes in autograd, and whether they are still there."""

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
"""The state of a `param.grad` that is None."""


class ParameterSink(Protocol):
    """Who is told what happens to parameters, in the order in which it happens.

    Attributes:
        counted_task: a backward of which `on_counted` alone is told.
        on_counted: as `on_ready`, of that one.
        meets_hooks: set where a parameter that a backward reaches has hooks of others.
    """

    counted_task: int
    on_counted: Callable[[str], None]
    meets_hooks: bool

    def on_gradient(self, name: str) -> None:
        """Autograd itself has a gradient for the parameter."""
        ...

    def on_written(self, name: str) -> None:
        """A backward has written to `param.grad` itself, and given autograd nothing."""
        ...

    def on_ready(self, name: str) -> None:
        """Everything that this backward has for the parameter is there."""
        ...

    def on_stale(self, name: str) -> None:
        """A gradient for the parameter has come by another node than the one that was watched."""
        ...


class _CountedHook(ReadyHook):
    """The hook of a watched parameter: without a further call, since it is called for each."""

    @untraced
    def __call__(self, _: Tensor) -> None:
        """Autograd has nothing more for the parameter in this backward."""
        watched = self._claim()
        if watched is None:
            return
        sink = watched._sink
        if sink.counted_task == current_task():
            sink.on_counted(watched.name)
        else:
            watched._ready()


class WatchedParameter(HookedClaim):
    """A trainable parameter: its accumulator node and the hooks that report to a sink."""

    ready_hook = _CountedHook

    def __init__(self, name: str, parameter: nn.Parameter, sink: ParameterSink) -> None:
        self.name, self.parameter, self._sink = name, parameter, sink
        self.dtype = parameter.dtype
        self._node: Node | None = get_gradient_edge(parameter).node
        self.marked: tuple[int, int] | None = None
        """The state of `param.grad` when the backward began."""
        super().__init__(parameter, sink, partial(sink.on_ready, name))

    @property
    def node(self) -> Node | None:
        """Which accumulates its gradient: the one of then, or, after `remove`, that of now."""
        held = self._node
        if held is None and self.parameter.requires_grad:
            return get_gradient_edge(self.parameter).node
        return held

    def remove(self) -> None:
        """Takes the hooks away, and lets go of the node, which knows a shape that may change."""
        super().remove()
        self.let_go()

    def _hold(self, node: Node | None) -> None:
        if node is not self._node:
            self._node = node
            self.hooks.follow_node()

    def let_go(self) -> None:
        """Of the node: until it is held again, it is looked up."""
        self._node = None

    def accumulates(self) -> bool:
        """Whether the current backward leaves a gradient in the parameter; raises as `reached`."""
        return bool(self.reached())

    def reached(self) -> bool | None:
        """Whether the current backward leaves a gradient in it; None if it is returned instead.

        That is to another backward, which called `torch.autograd.grad`.

        Raises:
            RuntimeError: it is returned, but not to another backward.
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
        """Whether it is trained and nobody else has a hook that wants the local gradient."""
        hooks = self.parameter._backward_hooks
        return self.parameter.requires_grad and hooks is not None and len(hooks) == 1

    @untraced
    def _before(self, gradient: Tensor | None) -> None:
        """Called whenever backward reaches the parameter; None if only taps feed it."""
        counted, p = self._sink.counted_task == current_task(), self.parameter
        if self._node is None:  # let go of; a node that is there since may have hooks of others
            self._hold(get_gradient_edge(p).node)
        if not counted and not self._is_accumulated():
            return
        own = p._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if len(own) > 1 or self.hooks.of_node:  # as in `with_any`
            self._sink.meets_hooks = True
            self.hooks.hold()
        if gradient is not None and not counted:
            self._sink.on_gradient(self.name)
        elif p.grad is not None and not counted and self._is_written():
            self._sink.on_written(self.name)

    def state_of_grad(self) -> tuple[int, int]:
        """Which tensor `param.grad` is, and its count of changes."""
        grad = self.parameter.grad
        return NO_GRADIENT if grad is None else (id(grad), grad._version)

    def _is_written(self) -> bool:
        """Whether a backward has written to `param.grad` itself, and given autograd nothing."""
        return self.marked is not None and self.marked != self.state_of_grad()

    def _is_accumulated(self) -> bool:
        """Whether the gradient that has come is accumulated, not returned to another backward."""
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
        if torch.is_grad_enabled():
            raise RuntimeError(_double_backward(self.name))
        return True


def _double_backward(name: str) -> str:
    return (
        f"{name!r}: backward(create_graph=True) cannot be shared between sites: the gradients of "
        f"the other sites have no graph here; gradients of inputs may be part of the loss by "
        f"torch.autograd.grad(..., inputs, create_graph=True); for those of weights, {_BY_CLONES}"
    )


def hold_again(watched: Collection[WatchedParameter]) -> list[Node | None]:
    """Has parameters hold the nodes that accumulate their gradients now; returns these."""
    nodes = accumulators([one.parameter for one in watched])
    for one, node in zip(watched, nodes, strict=True):
        one._hold(node)
    return nodes


class _Edges(torch.autograd.Function):
    """Of no use but that its node knows those of its inputs."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        return torch.empty(())


def accumulators(params: Sequence[nn.Parameter]) -> list[Node | None]:
    """Which nodes accumulate the gradients of parameters, None of those that are not trained."""
    with torch.enable_grad():
        node = _Edges.apply(*params).grad_fn
    return [None] * len(params) if node is None else list(map(itemgetter(0), node.next_functions))


def accumulating(watched: Mapping[str, WatchedParameter]) -> set[str]:
    """Names of those in which the current backward leaves a gradient; raises as `reached`."""
    found = set(watched)
    try:
        rest = [p for p in watched.values() if (n := p._node) is None or not _will_run(n)]
        found.difference_update([p.name for p in rest if not p.accumulates()] if rest else ())
    except RuntimeError:  # the gradient of one is returned; it is named here
        return {name for name, p in watched.items() if p.accumulates()}
    return found


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


def is_wanted(born_in: int, p: WatchedParameter) -> bool:
    """Whether a gradient is autograd's own.

    One that a custom function asks for in its backward, or of what was tapped in a backward.
    """
    reached = p.reached()
    return reached is None or (born_in != NO_TASK and reached)


class OwnParameters:
    """The parameters of some modules, and where they stood when these were distributed.

    Args:
        modules: the modules.
        watched: those of their parameters that are trained.
    """

    def __init__(self, modules: Iterable[nn.Module], watched: Iterable[WatchedParameter]) -> None:
        places = {
            id(p): (module, name.split("."))
            for module in modules
            for name, p in module.named_parameters()
        }
        self._places = [(w, *places[id(w.parameter)]) for w in watched]

    def are_there(self) -> bool:
        """Whether they are; not if somebody passes weights of their own (functional_call).

        Raises:
            RuntimeError: they were replaced or converted after `distribute`.
        """
        for watched, module, path in self._places:
            found = reduce(_child, path, module)
            if found is watched.parameter and found.dtype == watched.dtype:
                continue
            compiles = torch.compiler.is_dynamo_compiling()  # it cannot look at the stack
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
