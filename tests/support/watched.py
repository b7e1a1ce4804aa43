"""Compressors that a test can ask, of a method or of a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import outergrad as og
from outergrad.core.compressor import Compressor
from outergrad.core.types import Unit
from outergrad.linalg.gradients import as_tensor
from outergrad.linalg.outer import formed


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


def owed_by(session: og.Session) -> dict[str, Tensor]:
    """What a site has not sent, of all methods that it has had."""
    found: dict[str, Tensor] = {}
    for compressor, units in session._exchange.compressors.items():
        for matrix in (m for unit in units for m in unit.matrices):
            residual = compressor.residual(matrix)
            if residual is not None:
                whole = formed(residual).double().view(matrix.outputs, -1)
                found[matrix.weight] = found.get(matrix.weight, 0) + whole
    return found
