"""What methods have in common that send something of formed gradients, and the rest later."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Sequence

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
    Place,
    Route,
    Slot,
    StateDict,
    Unit,
    place_name,
)
from outergrad.linalg.gradients import as_tensor
from outergrad.linalg.outer import formed
from outergrad.messages.wire import Piece
from outergrad.methods.common import FLOAT_BYTES, dense_bytes
from outergrad.methods.residuals import ByPlace, inherited_residual, saved_residual


class OfFormed(Compressor):
    """Sends something of formed gradients, where that is fewer bytes than all of them.

    Vectors travel whole. A class that derives from it says what is sent, by `sent_rows`,
    `payload_bytes`, `compress` and `reveals`.
    """

    takes_plain = True
    exact = False
    way = Route.GATHER
    """How a unit travels that is fewer bytes so."""

    def break_even(self, unit: Unit, sites: int) -> float:
        """All rows or none: the bytes do not depend on them."""
        return math.inf if sites > 1 and self._pays(unit, sites) else 0.0

    def route(self, unit: Unit, rows_SK: Sequence[Sequence[int]], *, tapped: bool) -> Route:
        """Its own way, where that is fewer bytes."""
        return self.way if self.break_even(unit, len(rows_SK)) > 0 else Route.DENSE

    def taps(self, unit: Unit, rows_SK: Sequence[Sequence[int]]) -> bool:
        """Never: it takes formed gradients."""
        return False

    def sends_bias(self, slot: Slot) -> bool:
        """Of formed gradients biases are vectors, which travel by themselves."""
        return False

    def _pays(self, unit: Unit, sites: int) -> bool:
        if not unit.matrices:
            return False
        vectors = unit.dense_numel - sum(matrix.numel for matrix in unit.matrices)
        counts = [(m, self.sent_rows(m, m.outputs, 0)) for m in unit.matrices]
        sent, cost = sum(self.payload_bytes(*pair) for pair in counts), cost_of(self, sites)
        shared = cost.share(sent + FLOAT_BYTES * vectors, self.way)
        return self.forced or shared < dense_bytes(unit, cost)


class FormedCompressor(OfFormed):
    """Sends a payload of each formed gradient, and adds what that lacks to the next one.

    A class that derives from it gives the `form` of its payload and writes `encode` and `reveals`;
    `sent_rows` too, where not all entries have a part in it. Vectors travel whole, and so does a
    weight of which all is fewer bytes. What is remembered is a copy of the weights that travel.
    Source: Karimireddy et al., "Error Feedback Fixes SignSGD", arXiv 1901.09847.
    """

    why = Why.CODED
    bucket_bytes = 1 << 16

    def __init__(self) -> None:
        self._unsent = ByPlace[Tensor](lambda residual: residual)

    @abstractmethod
    def encode(self, slot: Slot, due_GOI: Tensor, count: int) -> Payload:
        """A payload of a gradient with what was not sent before.

        Args:
            slot: that it is of.
            due_GOI: in float32 at least; not to be changed.
            count: what `sent_rows` has said.

        Returns:
            A tensor for each field of the form, in its shape and dtype.
        """
        ...

    def sent_rows(self, slot: Slot, rows: int, site: int) -> int:
        """All entries, of a site that has a gradient."""
        return slot.numel if rows else 0

    def payload_bytes(self, slot: Slot, count: int) -> int:
        """What the fields of the form say."""
        return Piece(slot, count, torch.float32, None, (), self.form).nbytes

    def compress(self, parts: Sequence[Part]) -> list[Payload]:
        """A payload of each; what a reader does not find in it is kept for the next step."""
        return [self._compressed(*part) for part in parts]

    def _compressed(self, slot: Slot, gradient: Gradient, count: int) -> Payload:
        due_GOI = formed(gradient, self._unsent[slot])
        payload = self.encode(slot, due_GOI, count)
        arrives = as_tensor(
            self.form.read([t for t in payload if isinstance(t, Tensor)], slot, count)
        )
        residual = due_GOI - arrives.to(due_GOI.dtype)
        if math.isfinite(residual.sum().item()):  # not the remains of a step with infinities
            self._unsent[slot] = residual
        return payload

    def keep_before(self, places: Collection[Place]) -> None:
        """What was not sent before the last step is kept, too."""
        self._unsent.keep_before(places)

    def decide(self, places: Collection[Place], *, used: bool) -> None:
        """It is forgotten, or holds again."""
        self._unsent.decide(places, used=used)

    # -- handed over ----------------------------------------------------------------------------

    def remembers(self, unit: Unit) -> bool:
        """Always."""
        return True

    def hand_over(self, slots: Sequence[Slot]) -> dict[Slot, Gradient]:
        """All that has not arrived."""
        return dict(self._unsent.take_out(slots))

    def take_over(self, slot: Slot, residual: Gradient) -> None:
        """Adds to what it remembers itself, if anything."""
        self._unsent.put(slot, formed(residual, self._unsent[slot]))

    # -- remembered, saved and loaded -----------------------------------------------------------

    def residual(self, slot: Slot) -> Gradient | None:
        """What has not arrived of the gradients until now."""
        return self._unsent[slot]

    def commit(self, *, applied: bool) -> None:
        """Keeps what the step left, or, if the step is void, what there was before it."""
        self._unsent.commit(applied=applied)

    def state(self) -> StateDict:
        """What this site has not sent, by place."""
        held = self._unsent.held().items()
        memories = {place_name(place): saved_residual(residual) for place, residual in held}
        return {"own": {"memories": memories}}

    def load(self, inheritance: Inheritance) -> None:
        """Goes on from the residuals of the sites that this one takes over."""
        old = [state["own"]["memories"] for state in inheritance.residual]
        held: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for memories in old for name in memories):
            parts = [memories[name] for memories in old if name in memories]
            residual = inherited_residual(parts, inheritance.weight)
            if residual is not None:
                assert not isinstance(residual, Factors)
                held[name] = residual
        self._unsent.replace({inheritance.place_of[name]: r for name, r in held.items()})
