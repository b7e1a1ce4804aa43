"""The same entries of all sites: no places are sent, and values are added up."""

from __future__ import annotations

import zlib
from typing import Protocol

import torch
from torch import Tensor

from outergrad.core.payload import Entries
from outergrad.core.rounds import Sketches
from outergrad.core.types import Gradient, Slot, place_name
from outergrad.linalg.finite import is_finite
from outergrad.linalg.outer import widened
from outergrad.linalg.selection import random_k
from outergrad.methods.entries.form import EntriesForm
from outergrad.methods.entries.settings import SparseSettings


class Remembering(Protocol):
    """What `SparseCompressor` does for it."""

    settings: SparseSettings
    steps: int

    def count(self, slot: Slot) -> int:
        """K of this step."""
        ...

    def due(self, slot: Slot, gradient: Gradient) -> tuple[Tensor, Tensor | None]:
        """What a site would send, were it to send all, and the velocity."""
        ...

    def arriving(self, values_K: Tensor, dtype: torch.dtype) -> Tensor:
        """Values as they arrive."""
        ...

    def keep(
        self,
        slot: Slot,
        due_N: Tensor,
        velocity_N: Tensor | None,
        places_K: Tensor,
        arrives_K: Tensor,
    ) -> None:
        """Remembers what was not sent."""
        ...


class SharedEntries(Sketches):
    """The same random entries of all sites, added up: one all-reduce of their values."""

    rounds = 1

    def __init__(self, entries: Remembering, form: EntriesForm) -> None:
        self._entries, self._form = entries, form
        self._begun: dict[Slot, Tensor] = {}

    def columns(self, slot: Slot) -> int:
        """K."""
        return self._entries.count(slot)

    def shape(self, slot: Slot) -> tuple[int, ...]:
        """One number per entry."""
        return (self.columns(slot),)

    def begin(self, slot: Slot, gradient: Gradient) -> Tensor:
        """The values of this site; NaN, for all sites to see, where its gradient is not finite."""
        due_N, velocity_N = self._entries.due(slot, gradient)
        places_K = self._begun[slot] = self._drawn(slot, due_N.device)
        values_K = due_N[places_K]
        if not is_finite(due_N):
            return torch.full_like(values_K, torch.nan)
        self._entries.keep(
            slot, due_N, velocity_N, places_K, self._entries.arriving(values_K, values_K.dtype)
        )
        return values_K

    def _drawn(self, slot: Slot, device: torch.device) -> Tensor:
        """Other ones in every step and for every weight."""
        own = zlib.crc32(place_name(slot.place).encode())
        seed = (self._entries.settings.seed << 96) + (own << 64) + self._entries.steps
        blocks_B = random_k(*self._form.blocks(slot, self.columns(slot)), seed, device)
        return self._form.places(blocks_B, slot.numel)

    def end(self, slot: Slot, z: Tensor, sites: int) -> Entries:
        """The mean at the places."""
        shape = slot.groups, slot.outputs, slot.inputs
        return Entries(widened(z) / sites, self._begun.pop(slot), shape)
