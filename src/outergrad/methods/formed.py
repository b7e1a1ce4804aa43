"""Base classes of compressors that send a payload of formed gradients, with error feedback."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from outergrad.comm.cost import cost_of
from outergrad.core.compressor import Compressor
from outergrad.core.payload import Payload
from outergrad.core.reasons import Why
from outergrad.core.types import (
    Factors,
    Gradient,
    Inheritance,
    Part,
    Route,
    Slot,
    StateDict,
    Unit,
)
from outergrad.linalg.gradients import as_tensor
from outergrad.linalg.outer import formed
from outergrad.messages.wire import Piece
from outergrad.methods.common import FLOAT_BYTES, dense_bytes
from outergrad.methods.residuals import (
    ByPlace,
    Remembering,
    Saved,
    inherited_memories,
    inherited_residual,
    saved_residual,
)


class MatrixCompressor(Compressor):
    """Sends a payload of formed gradients where it is fewer bytes than the dense gradient.

    Vectors travel whole. A subclass defines the payload by `sent_rows`, `payload_bytes`, `compress`
    and `reveals`.
    """

    takes_plain = True
    exact = False
    way = Route.GATHER
    """Route of a unit whose payload is fewer bytes than its dense gradient."""

    def break_even(self, unit: Unit, sites: int) -> float:
        """Returns inf if the payload is fewer bytes, else 0: the number of rows does not matter."""
        return math.inf if sites > 1 and self._pays(unit, sites) else 0.0

    def route(self, unit: Unit, rows_SK: Sequence[Sequence[int]], *, tapped: bool) -> Route:
        """Returns `way` if the payload is fewer bytes, DENSE otherwise."""
        return self.way if self.break_even(unit, len(rows_SK)) > 0 else Route.DENSE

    def taps(self, unit: Unit, rows_SK: Sequence[Sequence[int]]) -> bool:
        """Returns False: autograd forms the gradients."""
        return False

    def sends_bias(self, slot: Slot) -> bool:
        """Returns False: biases are vectors, which travel by themselves."""
        return False

    def _pays(self, unit: Unit, sites: int) -> bool:
        if not unit.matrices:
            return False
        vectors = unit.dense_numel - sum(matrix.numel for matrix in unit.matrices)
        counts = [(m, self.sent_rows(m, m.outputs, 0)) for m in unit.matrices]
        sent, cost = sum(self.payload_bytes(*pair) for pair in counts), cost_of(self, sites)
        shared = cost.share(sent + FLOAT_BYTES * vectors, self.way)
        return self.forced or shared < dense_bytes(unit, cost)


class FormedCompressor(MatrixCompressor, Remembering[Tensor]):
    """Sends a payload of each formed gradient; error feedback adds its error to the next gradient.

    A subclass gives the `form` of its payload and writes `encode` and `reveals`. It also writes
    `sent_rows` if not all entries are in the payload. Vectors travel whole, and so does a weight
    whose dense gradient is fewer bytes. The residuals take as much memory as the compressed
    weights. Source: Karimireddy et al., "Error Feedback Fixes SignSGD", arXiv 1901.09847.
    """

    why = Why.CODED
    bucket_bytes = 1 << 16

    def __init__(self) -> None:
        self._memories = ByPlace[Tensor](lambda residual: residual)

    @abstractmethod
    def encode(self, slot: Slot, due_GOI: Tensor, count: int) -> Payload:
        """Returns the payload of a gradient plus its residual.

        Args:
            slot: Slot of the gradient.
            due_GOI: Gradient plus residual, float32 or float64; must not be changed.
            count: Result of `sent_rows`.

        Returns:
            One tensor for each field of the form, in its shape and dtype.
        """
        ...

    def sent_rows(self, slot: Slot, rows: int, site: int) -> int:
        """Returns the number of entries, or 0 for a site without a gradient."""
        return slot.numel if rows else 0

    def payload_bytes(self, slot: Slot, count: int) -> int:
        """Returns the bytes of the form's fields."""
        return Piece(slot, count, torch.float32, None, (), self.form).nbytes

    def compress(self, parts: Sequence[Part]) -> list[Payload]:
        """Returns a payload of each part, and keeps its error as the residual."""
        return [self._compressed(*part) for part in parts]

    def _compressed(self, slot: Slot, gradient: Gradient, count: int) -> Payload:
        due_GOI = formed(gradient, self._memories[slot])
        payload = self.encode(slot, due_GOI, count)
        arrives = as_tensor(
            self.form.read([t for t in payload if isinstance(t, Tensor)], slot, count)
        )
        residual = due_GOI - arrives.to(due_GOI.dtype)
        if math.isfinite(residual.sum().item()):  # with infinities the old one stays
            self._memories[slot] = residual
        return payload

    # -- residuals ------------------------------------------------------------------------------

    def _unsent(self, slot: Slot, memory: Tensor) -> Tensor:
        return memory

    def _added(self, slot: Slot, residual: Gradient) -> Tensor:
        return formed(residual, self._memories[slot])

    def _saved(self, memory: Tensor) -> StateDict:
        return saved_residual(memory)

    def load(self, inheritance: Inheritance) -> None:
        """Continues from the saved residuals that this site takes over."""
        self._memories.replace(inherited_memories(inheritance, _inherited))


def _inherited(parts: Sequence[Saved], weight: float) -> Tensor | None:
    residual = inherited_residual(parts, weight)
    assert not isinstance(residual, Factors)
    return residual
