"""A module computes by another forward, and is the same otherwise."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from outergrad._untraced import untraced


class ClassSwap:
    """Gives one module a subclass of its class, of the same name, with another forward.

    All else lives in the subclass's forward, not in the module: state_dict, `vars(module)`, copies
    and pickles are those of the plain module.

    Args:
        module: the module.
        forward: what to call in place of its own forward.
        in_graphs: what torch.compile traces instead, where there will be a backward; without it,
            forward is called outside of its graphs.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        in_graphs: Callable[..., Any] | None = None,
    ) -> None:
        self._module, self._plain = module, type(module)
        module.__class__ = _subclass(self._plain, module, untraced(forward), in_graphs)

    def plain_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self._plain.forward(self._module, *args, **kwargs)

    def restore(self) -> None:
        """Gives the module its own class back."""
        self._module.__class__ = self._plain


def _subclass(
    plain: type[nn.Module],
    module: nn.Module,
    instead: Callable[..., Any],
    in_graphs: Callable[..., Any] | None,
) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not module:
            return plain.forward(self, *args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            if not torch.is_grad_enabled():
                return plain.forward(self, *args, **kwargs)
            if in_graphs is not None:
                return in_graphs(*args, **kwargs)
        else:
            return instead(*args, **kwargs)
        from outergrad._tracing import outside_graphs

        return outside_graphs(instead, args, kwargs)

    def __reduce_ex__(self: nn.Module, protocol: int) -> Any:  # noqa: N807
        _, _, *state = plain.__reduce_ex__(self, protocol)  # type: ignore[misc]
        return copyreg._reconstructor, (first, object, None), *state  # type: ignore[attr-defined]

    first = vars(plain).get("_before_swaps", plain)  # a module may be swapped twice
    body = {
        "_before_swaps": first,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
    }
    return type(plain.__name__, (plain,), body)
