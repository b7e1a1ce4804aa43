"""A block's forward with other parameters, and tensors that leave it other than by its return.

The forward runs with detached parameters; its outputs are tied to them afterwards. What leaves it
through an attribute or a hook is not: a gradient for it would not reach the parameters.
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
    """The forward of a module's own class, without its hooks and whatever its class is now."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self._plain = module, type(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's class has it."""
        return self._plain.forward(self.module, *args, **kwargs)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Its arguments by the names that it has for them."""
        names = list(inspect.signature(self._plain.forward).parameters)[1:]
        more = [str(place) for place in range(len(names), len(args))]
        yield from zip([*names, *more], args, strict=False)
        yield from kwargs.items()

    def with_parameters(self, params: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        """Computes with these in the place of the parameters."""
        return functional_call(self, {f"module.{n}": p for n, p in params.items()}, args, kwargs)


def other_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module and of what is in it that are no parameters, in words."""
    for prefix, part in module.named_modules():
        start = f"{prefix}." if prefix else ""
        for kind, tensors in (("buffer", part._buffers), ("tensor", vars(part))):
            for key, t in tensors.items():
                if isinstance(t, Tensor) and not t.is_inference():
                    yield f"the {kind} {start + key!r}", t


class Escapes:
    """Has a backward raise that reaches such a tensor of one forward.

    Args:
        name: full name of the block.
        module: the block.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module

    @contextmanager
    def told(self) -> Iterator[None]:
        """Around the forward."""
        before = {id(t) for _, _, _, t in _attributes(self._module)}
        handles = [h for n, part in self._module.named_modules() for h in self._around(n, part)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for name, held, key, t in _attributes(self._module):
            if id(t) not in before:
                held[key] = _watched(t, self._error(f"the attribute {name!r}"))

    def _around(self, name: str, part: nn.Module) -> Iterator[Any]:
        """Lets the hooks of a part see its output as another tensor, if it has any."""
        if part is not self._module and part._forward_hooks:
            view = _HookView(self._error(f"a hook on {name!r}"))
            yield part.register_forward_hook(view.show, prepend=True)
            yield part.register_forward_hook(view.hide)

    def _error(self, way: str) -> str:
        return (
            f"block {self._name!r}: a tensor that left its forward through {way} has a gradient, "
            f"which would not reach the block's parameters: have the block return it, detach it, "
            f"or leave the block out of blocks="
        )


def _watched(t: Tensor, error: str, is_free: Callable[[], bool] = lambda: False) -> Tensor:
    """An alias of which a gradient is an error, unless it is free by then."""
    alias = t.view_as(t)

    def refuse(delta: Tensor) -> None:
        if not is_free():
            raise RuntimeError(error)

    alias.register_hook(refuse)
    return alias


class _HookView:
    """What the forward hooks of one module see in the place of its output.

    Args:
        error: what is wrong with a gradient of that.
    """

    def __init__(self, error: str) -> None:
        self._error, self._is_free = error, False
        self._real: Any = None
        self._seen: Any = None

    def show(self, part: nn.Module, args: Any, output: Any) -> Any:
        """The first hook."""
        try:
            tensors = flattened(output)[1]
        except TypeError:
            return None
        aliases = {id(t): self._alias(t) if t.grad_fn is not None else t for t in tensors}
        self._real, self._seen = output, exchanged(output, aliases)
        return self._seen

    def _alias(self, t: Tensor) -> Tensor:
        return _watched(t, self._error, lambda: self._is_free)

    def hide(self, part: nn.Module, args: Any, output: Any) -> Any:
        """The last hook: what one between has put in the place of the output goes on."""
        if output is self._seen:
            return self._real
        self._is_free = True
        return None


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Tensors with a graph among the attributes: full name, where each stands, key, itself."""
    for prefix, part in module.named_modules():
        for key, value in list(vars(part).items()):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                yield f"{prefix}.{key}".lstrip("."), vars(part), key, value
            elif type(value) in (list, dict) and value and key not in _OWN:
                yield from _items(f"{prefix}.{key}".lstrip("."), value)


def _items(name: str, held: Any) -> Iterator[tuple[str, Any, Any, Tensor]]:
    pairs = held.items() if isinstance(held, Mapping) else enumerate(held)
    for key, value in list(pairs):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            yield name, held, key, value


_OWN = frozenset(vars(nn.Module()))
