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
        """Returns an objection to a layer without inputs, which has no rows to flatten."""
        return None if module.in_features else "it has no inputs"

    def slots(self, module: nn.Linear, name: str) -> list[Slot]:
        """Returns one slot, the whole weight."""
        return [matrix_slot(module, name)]

    def forward(self, module: nn.Linear, tap: TapFn, input: Tensor) -> Tensor:
        """Computes the module's forward through a tap."""
        return tapped_linear(tap, input, module.weight, module.bias)

    def rows(self, module: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Returns the number of positions of the input."""
        return [input_of(args, kwargs).numel() // max(module.in_features, 1)]
