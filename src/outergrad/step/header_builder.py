"""Headers: what a site announces of a step before anything else is sent."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from outergrad.capture.tapped_layer import TappedLayer
from outergrad.core.blocks import Block
from outergrad.core.model import Model
from outergrad.core.transport import Comm
from outergrad.core.types import Slot
from outergrad.messages.header import MOST_ROWS, BlockUse, Header, Join, SlotUse
from outergrad.replay.block_message import Blocks
from outergrad.step.captured import NOTHING_LEFT, CarriedOver
from outergrad.step.transport_state import on_transport


class Loop(NamedTuple):
    """Facts of the loop around a step, as in `Header`."""

    weight: int
    join: Join
    buffers: tuple[bool, ...]
    whole: bool = False


PLAIN = Loop(1, Join.NONE, ())
"""All sites count alike, have batches, and keep their buffers."""


@dataclass(frozen=True)
class Announced:
    """Facts that this site's header of a backward is built from.

    Attributes:
        step: number of synchronised steps before this one.
        used: parameters in which the backward leaves a gradient.
        unshared: parameters in which earlier passes may have left a gradient.
        carried_over: rows that the step takes over from earlier passes.
        joint: count and fingerprint of the averaged deltas; None if there never are any. If there
            may be some, headers are always exchanged: a site must not wait for a mean that others
            do not take.
        loop: facts of the loop. Inside `session.join()` headers are always exchanged, so that all
            sites know in time which ones have run out.
        trained: parameters of `used` in which the backward itself leaves a gradient.
    """

    step: int
    used: Set[str]
    unshared: Set[str] = frozenset()
    carried_over: CarriedOver = field(default_factory=CarriedOver)
    joint: tuple[int, int] | None = None
    loop: Loop = PLAIN
    trained: Set[str] = frozenset()


_NONE = frozenset[str]()


@dataclass
class _Entry:
    """A slot, and what was announced of it last.

    Attributes:
        slot: the slot.
        params: parameters of its unit.
        layer: layer that makes its products.
        number: index of the slot in the layer.
        seen: what the layer reported; None if earlier passes contributed.
        use: what was announced.
    """

    slot: Slot
    params: tuple[str, ...]
    layer: TappedLayer
    number: int
    seen: tuple[int, int, torch.dtype] | None = None
    use: SlotUse | None = None


class HeaderBuilder:
    """Builds the headers of a session."""

    def __init__(self, model: Model, fingerprint: int, comm: Comm, blocks: Blocks) -> None:
        self._model, self._fingerprint, self._comm = model, fingerprint, comm
        self._blocks = blocks
        self._place: dict[Slot, tuple[TappedLayer, int]] = {}
        self._entries: list[_Entry] = []

    def move(self, comm: Comm) -> None:
        """Sets the transport of the headers from now on."""
        self._comm = comm

    def add(self, layer: TappedLayer) -> None:
        """Registers a layer whose class was swapped."""
        self._place.update({slot: (layer, k) for k, slot in enumerate(layer.slots)})

    def of(self, model: Model) -> HeaderBuilder:
        """Returns the builder of a part of the model."""
        part = HeaderBuilder(model, self._fingerprint, self._comm, self._blocks)
        part._place = self._place
        return part

    @property
    def rows(self) -> dict[Slot, int]:
        """Number of rows per slot that this site's last header was built from, before rounding."""
        said = {slot: layer.announced_rows[k] for slot, (layer, k) in self._place.items()}
        return {slot: rows for slot, rows in said.items() if rows is not None}

    @property
    def untappable(self) -> dict[Slot, str]:
        """Reason per slot why this site could not tap it in what the last header announced."""
        found = {slot: layer.untappable for slot, (layer, _) in self._place.items()}
        return {slot: why for slot, why in found.items() if why is not None}

    def _of_slots(self) -> list[_Entry]:
        if not self._entries:  # layers are added after it is made
            unit_of = {slot: unit for unit in self._model.units for slot in unit.slots}
            self._entries = [
                _Entry(slot, unit_of[slot].params, *self._place[slot]) for slot in self._model.slots
            ]
        return self._entries

    def header(self, about: Announced) -> Header:
        """Returns this site's header of a backward; accumulated gradients count as used."""
        params, joint, loop = self._model.params, about.joint, about.loop
        waiting = {name for name in about.unshared if params[name].grad is not None}
        has_gradient = tuple(map((about.used | waiting).__contains__, params))
        formed = waiting - about.carried_over.params
        told = formed, about.carried_over, about.trained
        uses = [self._use(entry, *told) for entry in self._of_slots()]
        uses += [self._block_use(block, formed) for block in self._model.blocks]
        alone = len(on_transport(self._comm.key).attached) == 1 and joint is None
        alone = alone and loop.join == Join.NONE
        own = (self._fingerprint, about.step, self._comm.rank)
        return Header(*own, has_gradient, tuple(uses), alone, joint or (0, 0), *loop)

    def uses_as(self, header: Header, used: Set[str]) -> bool:
        """True if a backward without earlier gradients uses all layers as a header says.

        Args:
            header: header of another step.
            used: parameters in which the backward leaves a gradient.
        """
        slots, blocks = self._of_slots(), self._model.blocks
        of_slots, of_blocks = header.uses[: len(slots)], header.uses[len(slots) :]
        for entry, use in zip(slots, of_slots, strict=True):
            now = self._use(entry, _NONE, NOTHING_LEFT, used)
            if now is not use and now != use:
                return False
        pairs = zip(blocks, of_blocks, strict=True)
        return all(self._block_use(block, _NONE) == use for block, use in pairs)

    def absent(self, step: int, loop: Loop) -> Header:
        """Returns the header of a site that uses nothing in a step."""
        no_rows, nothing = SlotUse(0, True, torch.float32), BlockUse(0, True)
        model, own = self._model, (self._fingerprint, step, self._comm.rank)
        used = (False,) * len(model.params)
        uses = (*(no_rows,) * len(model.slots), *(nothing,) * len(model.blocks))
        return Header(*own, used, uses, False, (0, 0), *loop)

    def _block_use(self, block: Block, formed: Set[str]) -> BlockUse:
        nbytes, untapped = self._blocks.announce(block).nbytes, self._blocks[block].untapped_nbytes
        suffices = untapped == 0 and formed.isdisjoint(block.params)
        return BlockUse(min(nbytes + _rounded_up(untapped), MOST_ROWS - 1), suffices)

    def _use(
        self, entry: _Entry, formed: Set[str], carried_over: CarriedOver, trained: Set[str]
    ) -> SlotUse:
        layer, k, use = entry.layer, entry.number, entry.use
        if use is not None and layer.is_known(k) and not carried_over.stacked:
            return use
        seen = tapped, untapped, dtype = layer.announced(k, trained)
        plain = not (formed or carried_over.stacked)
        if use is not None and plain and seen == entry.seen:
            layer.announced_rows[k] = tapped + untapped
            return use
        rows, dtype = carried_over.announced(entry.slot, tapped, dtype)
        suffices = untapped == 0 and formed.isdisjoint(entry.params)
        left = carried_over.formed.get(entry.slot, 0) if entry.slot.weight in formed else 0
        layer.announced_rows[k] = rows + untapped + left
        entry.seen = seen if plain else None
        entry.use = SlotUse(rows + _coarse(entry.slot, untapped + left), suffices, dtype)
        return entry.use


def _coarse(slot: Slot, rows: int) -> int:
    """Rounds up rows that only a later choice depends on, so that small changes need no new plan.

    From O + I rows on, factors are never smaller than the product.
    """
    return min(_rounded_up(rows), slot.outputs + slot.inputs)


def _rounded_up(count: int) -> int:
    grain = 1 << max(count.bit_length() - 3, 0)
    return -(-count // grain) * grain
