"""Forward pass of a block with other parameters, and detection of tensors that leave it otherwise.

The forward pass runs with detached parameters; its outputs are tied to them afterwards. A tensor
that leaves through an attribute or a hook is not tied to them: its gradient would not reach the
parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from outergrad.core.structure import exchanged, flattened


class Forward(nn.Module):
    """Forward of a module's original class, without hooks and whatever its class is now."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self._plain = module, type(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward of the module's original class."""
        return self._plain.forward(self.module, *args, **kwargs)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yields the arguments with their parameter names, or their index beyond these."""
        names = list(inspect.signature(self._plain.forward).parameters)[1:]
        more = [str(place) for place in range(len(names), len(args))]
        yield from zip([*names, *more], args, strict=False)
        yield from kwargs.items()

    def with_parameters(self, params: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        """Computes with `params` in place of the module's parameters."""
        return functional_call(self, {f"module.{n}": p for n, p in params.items()}, args, kwargs)


def other_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields a description and the tensor for each buffer and tensor attribute in a module."""
    for prefix, part in module.named_modules():
        start = f"{prefix}." if prefix else ""
        for kind, tensors in (("buffer", part._buffers), ("tensor", vars(part))):
            for key, t in tensors.items():
                if isinstance(t, Tensor) and not t.is_inference():
                    yield f"the {kind} {start + key!r}", t


@contextmanager
def escapes_refused(name: str, module: nn.Module) -> Iterator[None]:
    """Context of one forward pass, after which gradients of escaped tensors raise.

    A tensor escapes if it leaves the block other than by being returned.

    Args:
        name: full name of the block.
        module: the block.
    """

    def error(way: str) -> str:
        return (
            f"block {name!r}: a tensor that left its forward through {way} has a gradient, "
            f"which would not reach the block's parameters: have the block return it, detach it, "
            f"or leave the block out of blocks="
        )

    before = {id(t) for _, _, _, t in _attributes(module)}
    hooked = [(n, m) for n, m in module.named_modules() if m is not module and m._forward_hooks]
    views = [_HookView(part, error(f"a hook on {n!r}")) for n, part in hooked]
    try:
        yield
    finally:
        for view in views:
            view.remove()
    for attribute, held, key, t in _attributes(module):
        if id(t) not in before:
            held[key] = _refused(t, error(f"the attribute {attribute!r}"))


def _refused(t: Tensor, error: str, is_free: Callable[[], bool] = lambda: False) -> Tensor:
    """Alias of `t` whose gradient is an error, unless `is_free()` in the backward pass."""
    alias = t.view_as(t)

    def refuse(delta: Tensor) -> None:
        if not is_free():
            raise RuntimeError(error)

    alias.register_hook(refuse)
    return alias


class _HookView:
    """Shows the forward hooks of a module aliases in place of its output.

    Args:
        part: the module.
        error: text of the error if an alias gets a gradient.
    """

    def __init__(self, part: nn.Module, error: str) -> None:
        self._error, self._is_free = error, False
        self._real: Any = None
        self._seen: Any = None
        first = part.register_forward_hook(self._show, prepend=True)
        self._handles = [first, part.register_forward_hook(self._hide)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _show(self, part: nn.Module, args: Any, output: Any) -> Any:
        """First hook: swaps the output for aliases."""
        try:
            tensors = flattened(output)[1]
        except TypeError:
            return None
        aliases = {id(t): self._alias(t) if t.grad_fn is not None else t for t in tensors}
        self._real, self._seen = output, exchanged(output, aliases)
        return self._seen

    def _alias(self, t: Tensor) -> Tensor:
        return _refused(t, self._error, lambda: self._is_free)

    def _hide(self, part: nn.Module, args: Any, output: Any) -> Any:
        """Last hook: swaps back, unless a hook between has replaced the output."""
        if output is self._seen:
            return self._real
        self._is_free = True
        return None


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Tensors with a graph in attributes, each as (full name, container, key, tensor)."""
    for prefix, part in module.named_modules():
        for key, value in list(vars(part).items()):
            name, held = f"{prefix}.{key}".lstrip("."), [(vars(part), key, value)]
            if type(value) in (list, dict) and key not in _OWN:
                pairs = value.items() if isinstance(value, dict) else enumerate(value)
                held = [(value, *pair) for pair in pairs]
            for where, place, t in held:
                if isinstance(t, Tensor) and t.grad_fn is not None:
                    yield name, where, place, t


_OWN = frozenset(vars(nn.Module()))
