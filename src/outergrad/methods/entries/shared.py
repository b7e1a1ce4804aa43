"""Random entries common to all sites: no places are sent, and values are all-reduced."""

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
    """Part of `SparseCompressor` that `SharedEntries` uses."""

    settings: SparseSettings
    steps: int

    def count(self, slot: Slot) -> int:
        """Returns K, the number of entries of a slot that are sent in this step."""
        ...

    def due(self, slot: Slot, gradient: Gradient) -> tuple[Tensor, Tensor | None]:
        """Returns the gradient plus the residual, and the velocity."""
        ...

    def arriving(self, values_K: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the values as receivers decode them."""
        ...

    def keep(
        self,
        slot: Slot,
        due_N: Tensor,
        velocity_N: Tensor | None,
        places_K: Tensor,
        arrives_K: Tensor,
    ) -> None:
        """Keeps the unsent part as the residual."""
        ...


class SharedEntries(Sketches):
    """Sketch of random entries common to all sites: one all-reduce of their values."""

    rounds = 1

    def __init__(self, entries: Remembering, form: EntriesForm) -> None:
        self._entries, self._form = entries, form
        self._begun: dict[Slot, Tensor] = {}

    def columns(self, slot: Slot) -> int:
        """Returns K."""
        return self._entries.count(slot)

    def shape(self, slot: Slot) -> tuple[int, ...]:
        """Returns (K,): one number per entry."""
        return (self.columns(slot),)

    def begin(self, slot: Slot, gradient: Gradient) -> Tensor:
        """Returns this site's values; NaN, for all sites to see, if its gradient is not finite."""
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
        """Returns places that differ between steps and between weights, but not between sites."""
        own = zlib.crc32(place_name(slot.place).encode())
        seed = (self._entries.settings.seed << 96) + (own << 64) + self._entries.steps
        blocks_B = random_k(*self._form.blocks(slot, self.columns(slot)), seed, device)
        return self._form.places(blocks_B, slot.numel)

    def end(self, slot: Slot, z: Tensor, sites: int) -> Entries:
        """Returns the mean over the sites at the places."""
        shape = slot.groups, slot.outputs, slot.inputs
        return Entries(widened(z) / sites, self._begun.pop(slot), shape)
