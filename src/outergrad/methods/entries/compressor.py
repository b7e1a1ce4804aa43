"""Compressor of `Sparse`: selects the entries that are sent, and keeps the others as residuals."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outergrad.core.coding import nbytes, received
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
from outergrad.linalg.finite import is_finite
from outergrad.linalg.outer import formed
from outergrad.linalg.selection import above, blocks_of, leading_blocks, top_k
from outergrad.methods.entries.form import EntriesForm, in_rows, value_shape
from outergrad.methods.entries.settings import Select, SparseSettings
from outergrad.methods.entries.shared import SharedEntries
from outergrad.methods.formed import MatrixCompressor
from outergrad.methods.residuals import ByPlace, inherited_residual, saved_residual

_WHICH: dict[Select, str] = {
    "threshold": "the largest",
    "topk": "the largest",
    "blocks": "in blocks of {block}",
    "random": "the same on all sites",
    "random_blocks": "in blocks of {block}, the same on all sites",
}


@dataclass(frozen=True)
class _Memory:
    """Memory of one slot, flattened.

    Attributes:
        residual_N: Entries that have not been sent.
        velocity_N: Momentum of the gradients; None without momentum correction.
    """

    residual_N: Tensor
    velocity_N: Tensor | None = None


class SparseCompressor(MatrixCompressor):
    """Sends a few entries of each weight gradient, and keeps the others as the residual."""

    why = Why.SPARSE

    def __init__(self, settings: SparseSettings) -> None:
        self.settings, self.forced = settings, settings.always
        self.bucket_bytes, self.wire = settings.bucket_bytes, settings.codecs
        self.form = self._form = EntriesForm(settings.chosen_together)
        self._memories = ByPlace[_Memory](lambda memory: memory)
        self.sketches = SharedEntries(self, self._form) if settings.sums else None
        self.way = Route.REDUCE if settings.sums else Route.GATHER
        self.steps, self.phase = 0, settings.density_at(0)

    # -- how many entries ---------------------------------------------------------------------

    def count(self, slot: Slot) -> int:
        """Returns K, the number of entries of a slot that are sent in this step."""
        wanted = max(1, round(self.settings.density_at(self.steps) * slot.numel))
        if wanted >= slot.numel:
            return slot.numel
        return blocks_of(slot.numel, wanted, self._form.block)[1]

    def sent_rows(self, slot: Slot, rows: int, site: int) -> int:
        """Returns K, equal for all sites that have a gradient; 0 for a site without one."""
        return self.count(slot) if rows else 0

    def payload_bytes(self, slot: Slot, count: int) -> int:
        """Returns the bytes of the values, and of their places if these are sent."""
        values = nbytes(self.wire, value_shape(count, coded=bool(self.wire)))
        if self.sketches is not None:
            return values
        fields = self.form.fields(slot, count, torch.float32, None, ())
        return values + sum(field.shape[0] for field in fields[1:])

    # -- entries --------------------------------------------------------------------------------

    def compress(self, parts: Sequence[Part]) -> list[Payload]:
        """Returns the selected entries of each gradient plus its residual."""
        return [self._compressed(*part) for part in parts]

    def _compressed(self, slot: Slot, gradient: Gradient, count: int) -> Payload:
        due_N, velocity_N = self.due(slot, gradient)
        finite = is_finite(due_N)
        blocks_B = self._chosen(due_N, count, finite=finite)
        places_K = self._form.places(blocks_B, len(due_N))
        values_K = due_N[places_K]
        dtype = gradient.dtype if isinstance(gradient, Tensor) else values_K.dtype
        if finite:
            self.keep(slot, due_N, velocity_N, places_K, self.arriving(values_K, dtype))
        return self._form.payload(values_K, blocks_B, slot, self.wire)

    def _chosen(self, due_N: Tensor, count: int, *, finite: bool) -> Tensor:
        """Returns the numbers of the selected blocks, sorted; of blocks of one entry, the places.

        A threshold cannot be estimated if entries are not finite; `top_k` selects these first.
        """
        if count == len(due_N):
            return torch.arange(-(-count // self._form.block), device=due_N.device)
        if self._form.block > 1:
            return leading_blocks(due_N, count, self._form.block)
        estimates = self.settings.select == "threshold" and finite
        return above(due_N, count) if estimates else top_k(due_N, count)

    def due(self, slot: Slot, gradient: Gradient) -> tuple[Tensor, Tensor | None]:
        """Returns the gradient plus the residual: new memory, flat, float32 or float64.

        Returns:
            With momentum correction `v = v + u` and `u = m u + g`, otherwise `v + g` and None.
        """
        memory, due_N = self._memories[slot], formed(gradient).flatten()
        velocity_N = None
        if self.settings.momentum:
            before = None if memory is None else memory.velocity_N
            velocity_N = due_N if before is None else due_N + self.settings.momentum * before
            due_N = velocity_N.clone()
        return due_N if memory is None else due_N.add_(memory.residual_N), velocity_N

    def keep(
        self,
        slot: Slot,
        due_N: Tensor,
        velocity_N: Tensor | None,
        places_K: Tensor,
        arrives_K: Tensor,
    ) -> None:
        """Keeps the unsent part as the residual, and clears the momentum of the sent entries.

        Args:
            slot: The slot.
            due_N: First result of `due`, finite; changed in place.
            velocity_N: Second result of `due`.
            places_K: Places of the entries that were sent.
            arrives_K: Values of these entries as receivers decode them.
        """
        if not self.settings.error_feedback:
            return
        due_N[places_K] -= arrives_K
        if velocity_N is not None:
            velocity_N = velocity_N.index_fill(0, places_K, 0.0)
        self._memories[slot] = _Memory(due_N, velocity_N)

    def arriving(self, values_K: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the values as receivers decode them."""
        if not self.wire:
            return values_K.to(dtype).to(values_K.dtype)
        rows = in_rows(values_K)
        return received(self.wire, rows).flatten()[: len(values_K)].to(values_K.dtype)

    def residual(self, slot: Slot) -> Gradient | None:
        """Returns what error feedback adds to the gradient of the next step; None for nothing."""
        memory = self._memories[slot]
        if memory is None:
            return None
        return memory.residual_N.view(slot.groups, slot.outputs, slot.inputs)

    def commit(self, *, applied: bool) -> None:
        """Keeps the step's memories and counts it if it is applied, else discards them."""
        self._memories.commit(applied=applied)
        self.steps += applied
        self.phase = self.settings.density_at(self.steps)

    def keep_before(self, places: Collection[Place]) -> None:
        """Keeps the residuals of before the last committed step until `decide`."""
        self._memories.keep_before(places)

    def decide(self, places: Collection[Place], *, used: bool) -> None:
        """Drops what `keep_before` kept, or restores it if the gradients were not used."""
        self._memories.decide(places, used=used)

    # -- change of the method -------------------------------------------------------------------

    def remembers(self, unit: Unit) -> bool:
        """True if error feedback is on."""
        return self.settings.error_feedback

    def hand_over(self, slots: Sequence[Slot]) -> dict[Slot, Gradient]:
        """Returns and forgets the residuals of these slots; their velocity is dropped."""
        shapes = {slot: (slot.groups, slot.outputs, slot.inputs) for slot in slots}
        found = self._memories.take_out(slots)
        return {slot: memory.residual_N.view(shapes[slot]) for slot, memory in found.items()}

    def take_over(self, slot: Slot, residual: Gradient) -> None:
        """Adds a residual to the slot's own one, if there is one."""
        own = self._memories[slot]
        whole_N = formed(residual).flatten()
        if own is not None:
            own = replace(own, residual_N=own.residual_N + whole_N)
        self._memories.put(slot, own or _Memory(whole_N))

    # -- state of a checkpoint ------------------------------------------------------------------

    def state(self) -> StateDict:
        """Returns, under "common", what is equal on all sites and, under "own", what is not."""
        held = self._memories.held()
        memories = {place_name(place): _saved(memory) for place, memory in held.items()}
        return {"common": {"sparse": {"steps": self.steps}}, "own": {"memories": memories}}

    def load(self, inheritance: Inheritance) -> None:
        """Continues from the saved residuals that this site takes over."""
        self.steps = inheritance.first["common"]["sparse"]["steps"]
        self.phase = self.settings.density_at(self.steps)
        old = [state["own"]["memories"] for state in inheritance.residual]
        names = dict.fromkeys(name for memories in old for name in memories)
        found = {name: [part[name] for part in old if name in part] for name in names}
        self._memories.replace(
            {
                inheritance.place_of[name]: _inherited(parts, inheritance.weight)
                for name, parts in found.items()
                if any("unsent" in part for part in parts)
            }
        )

    def reveals(self, unit: Unit) -> str:
        """Returns what other sites learn from the unit, for the coverage table."""
        return "this site's gradient, its largest entries"

    def amount(self, unit: Unit) -> str:
        """Returns the density of the next step and the selection, for the coverage table."""
        which = _WHICH[self.settings.select].format(block=self.settings.block)
        return f"{100 * self.settings.density_at(self.steps):.3g}% of the entries, {which}"


def _saved(memory: _Memory) -> StateDict:
    velocity = {} if memory.velocity_N is None else {"unsent_velocity": memory.velocity_N}
    return {**saved_residual(memory.residual_N), **velocity}


def _inherited(parts: Sequence[StateDict], weight: float) -> _Memory:
    velocities = [{"unsent": p["unsent_velocity"]} for p in parts if "unsent_velocity" in p]
    residual, velocity = inherited_residual(parts, weight), inherited_residual(velocities, weight)
    assert isinstance(residual, Tensor)
    assert not isinstance(velocity, Factors)
    return _Memory(residual, velocity)
