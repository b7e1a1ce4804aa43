"""A module computes by another forward, and is the same otherwise."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

from torch import nn


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
