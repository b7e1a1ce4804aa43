"""Linear layers: `y = x Wᵀ + b`, so `dW = deltaᵀ x` over all positions."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from outergrad.core.protocols import TapFn
from outergrad.core.types import Call, Factors, Slot
from outergrad.layers._common import detached, is_plain, join, rows_of


class LinearRule:
    """`nn.Linear` on inputs of any number of dimensions."""

    owns: tuple[str, ...] = ()
    traceable: bool = True

    def objection(self, module: nn.Linear) -> str | None:
        """Parametrised weights are no leaves; without inputs there is nothing to flatten."""
        if not module.in_features:
            return "it has no inputs"
        return None if is_plain(module, "weight") else "its weight is computed from others"

    def slots(self, module: nn.Linear, name: str) -> list[Slot]:
        """One: the whole weight."""
        bias = None if module.bias is None else join(name, "bias")
        return [Slot(name, join(name, "weight"), *module.weight.shape, bias=bias)]

    def forward(self, module: nn.Linear, tap: TapFn, input: Tensor) -> Tensor:
        """As `nn.Linear`; flat before the tap, whose output may not be a view."""
        return tapped_linear(tap, input, module.weight, module.bias)

    def rows(self, module: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """All positions of the input."""
        x = args[0] if args else kwargs["input"]
        return [x.numel() // max(module.in_features, 1)]

    def factors(self, module: nn.Linear, slot: int, call: Call) -> Factors:
        """Input and delta, flattened."""
        return linear_factors(call)


def tapped_linear(
    tap: TapFn, x: Tensor, weight: Tensor, bias: Tensor | None, slot: int = 0
) -> Tensor:
    """`F.linear` through a tap; x of shape (..., I), the result (..., O)."""
    flat_NI = x.reshape(-1, x.shape[-1])
    y_NO = F.linear(flat_NI, weight.detach(), detached(bias))
    return tap(y_NO, flat_NI, slot).view(*x.shape[:-1], weight.shape[0])


def linear_factors(call: Call) -> Factors:
    """Input and delta in delta's dtype, which is what autograd multiplies under autocast."""
    d_GNO = rows_of(call.d, call.d.shape[-1])
    return Factors(d_GNO, rows_of(call.a, call.a.shape[-1]).to(d_GNO.dtype))
