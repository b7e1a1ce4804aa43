"""A detector that a test can steer: every value above a limit is drift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STEADY, JUMP, REFUSED_VALUE = 0.0, 2.0, -77.0


@dataclass(frozen=True)
class Jumps:
    """Drift is where the sum of the values since the last exchange is above 1."""

    def start(self) -> Summed:
        return Summed()


class Summed:
    """One run of `Jumps`."""

    def __init__(self) -> None:
        self.total = 0.0

    def has_drifted(self, values: Tensor) -> bool:
        assert values.dtype == torch.float64
        assert values.dim() == 1
        assert len(values)
        if float(values.min()) == REFUSED_VALUE:
            raise ArithmeticError("a value that this detector refuses")
        self.total += float(values.sum())
        return self.total > 1

    def state(self) -> dict[str, Any]:
        return {"total": self.total}

    def load(self, state: dict[str, Any]) -> None:
        self.total = state["total"]
