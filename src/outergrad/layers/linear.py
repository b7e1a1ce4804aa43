"""Linear layers: `y = x Wᵀ + b`, so `dW = deltaᵀ x` over all positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from outergrad.core.protocols import TapFn
from outergrad.core.types import Slot
from outergrad.layers._common import (
    LinearProducts,
    input_of,
    matrix_slot,
    tapped_linear,
)


class LinearRule(LinearProducts):
    """`nn.Linear` on inputs of any number of dimensions."""

    traceable: bool = True

    def objection(self, module: nn.Linear) -> str | None:
        """Without inputs there is nothing to flatten."""
        return None if module.in_features else "it has no inputs"

    def slots(self, module: nn.Linear, name: str) -> list[Slot]:
        """One: the whole weight."""
        return [matrix_slot(module, name)]

    def forward(self, module: nn.Linear, tap: TapFn, input: Tensor) -> Tensor:
        """As `nn.Linear`."""
        return tapped_linear(tap, input, module.weight, module.bias)

    def rows(self, module: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """All positions of the input."""
        return [input_of(args, kwargs).numel() // max(module.in_features, 1)]
