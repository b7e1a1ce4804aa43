"""The forward of a module with other parameters, and what else the module holds."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


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
