"""A method whose compressor a test can ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from outergrad.core.compressor import Compressor
from outergrad.core.types import Unit
from outergrad.linalg.gradients import as_tensor


@dataclass
class Watched:
    """Another method, and the compressors that it has made."""

    method: Any
    every: int = 1
    made: list[Compressor] = field(default_factory=list)

    def compressor(self) -> Compressor:
        self.made.append(self.method.compressor())
        return self.made[-1]

    def __repr__(self) -> str:
        return repr(self.method)


def residuals(compressor: Compressor, units: Sequence[Unit]) -> dict[str, Tensor]:
    """What is owed of each weight."""
    pairs = [(slot, compressor.residual(slot)) for unit in units for slot in unit.matrices]
    return {slot.weight: as_tensor(owed) for slot, owed in pairs if owed is not None}
