"""How the gradients of the ranks of one site come together, and go back to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from outergrad.buckets.bucket import copy_scaled
from outergrad.buckets.message import sums_of_extras
from outergrad.comm.torch import TorchComm
from outergrad.core.errors import ExchangeError
from outergrad.core.model import Model, part_of
from outergrad.core.owners import owners
from outergrad.core.reasons import Reason
from outergrad.core.types import Factors, Slot, Unit
from outergrad.messages.header import SlotUse
from outergrad.messages.layout import Layout
from outergrad.messages.wire import Piece
from outergrad.session.mesh.rank_reports import Fate, Report, ShareOutcome, fate_of, told_reasons

_MOST_TEXT = 1 << 24
_LEAST_BYTES = 16
"""Of a message: a transport may not like empty ones."""


def shares(model: Model, ranks: int) -> list[Model]:
    """What each rank of a site takes to the other sites: parts of about the same size."""
    sizes: dict[tuple[str, ...], float] = {u.params: u.dense_numel for u in model.units}
    inside = {name for unit in model.units for name in unit.params}
    sizes.update({(n,): p.numel() for n, p in model.params.items() if n not in inside})
    owner = owners(sizes, ranks)
    names = [{n for key, rank in owner.items() if rank == r for n in key} for r in range(ranks)]
    return [part_of(model, names[rank]) for rank in range(ranks)]


class Pooling:
    """What is pooled as rows and what as gradients: from all reports, so the same on all ranks.

    Rows of all ranks stand behind each other, which costs nothing of what a method can do with
    factors; where one rank has none, all form their gradients, and these are summed.

    Args:
        model: what is shared.
        shares: which rank pools what.
        reports: of the ranks of this site.

    Attributes:
        used: parameters that some rank has a gradient for.
        formed: those of them that are pooled as gradients.
    """

    def __init__(self, model: Model, shares: Sequence[Model], reports: Sequence[Report]) -> None:
        self._params, self._shares, self._reports = model.params, shares, reports
        self._index = {slot: k for k, slot in enumerate(model.slots)}
        self.used = self._some(report.header.used for report in reports)
        has_autograd_grad = self._some(report.has_autograd_grad for report in reports)
        rows = {u for u in model.units if u.slots and self._all_tapped(u)}
        self._of_rows = {
            slot for u in rows if has_autograd_grad.isdisjoint(u.params) for slot in u.slots
        }
        inside = {name for slot in self._of_rows for name in slot.params}
        self.formed = [name for name in model.params if name in self.used - inside]

    def _some(self, masks: Iterable[Sequence[bool]]) -> set[str]:
        flags = zip(*masks, strict=True)
        return {name for name, mask in zip(self._params, flags, strict=True) if any(mask)}

    def _all_tapped(self, unit: Unit) -> bool:
        return all(use.tapped for slot in unit.slots for use in self._uses(slot))

    def _uses(self, slot: Slot) -> list[SlotUse]:
        """Of each rank."""
        return [report.header.uses[self._index[slot]] for report in self._reports]

    def use(self, slot: Slot) -> SlotUse:
        """How the site as a whole uses a slot."""
        uses = self._uses(slot)
        return SlotUse(sum(use.rows for use in uses), slot in self._of_rows, _dtype(uses))

    def layout(self, rank: int, owner: int) -> Layout:
        """What a rank has for the one that pools a share."""
        share = self._shares[owner]
        extras = {name: p for name, p in share.params.items() if name in set(self.formed)}
        slots = [slot for slot in share.slots if slot in self._of_rows]
        uses = [self._uses(slot) for slot in slots]
        pairs = zip(slots, uses, strict=True)
        return Layout(0, extras, [Piece(s, u[rank].rows, _dtype(u), None) for s, u in pairs])


def _dtype(uses: Sequence[SlotUse]) -> torch.dtype:
    dtypes = [use.dtype for use in uses if use.rows]
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32


def pool(
    pooling: Pooling, comm: TorchComm, rows: Mapping[Slot, Factors], params: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[Slot, list[Factors]]]:
    """Sends every rank what it pools of this one's; the mean gradients and rows of its own share.

    Args:
        pooling: what is sent how.
        comm: to the ranks of this site.
        rows: this rank's.
        params: with its gradients.
    """
    ranks = range(comm.world_size)
    outgoing = [_filled(pooling.layout(comm.rank, o), comm, rows, params) for o in ranks]
    layouts = [pooling.layout(rank, comm.rank) for rank in ranks]
    arrived = comm.all_to_all(outgoing, [_length(layout) for layout in layouts]).wait()
    stacked: dict[Slot, list[Factors]] = {}
    for layout, message in zip(layouts, arrived, strict=True):
        for piece, factors in zip(layout.pieces, layout.factors(message), strict=True):
            if factors is not None:
                scaled = factors._replace(d_GRO=factors.d_GRO / comm.world_size)
                stacked.setdefault(piece.slot, []).append(scaled)
    return sums_of_extras(layouts, arrived), stacked


def _length(layout: Layout) -> int:
    return max(layout.nbytes, _LEAST_BYTES)


def _filled(
    layout: Layout, comm: TorchComm, rows: Mapping[Slot, Factors], params: Mapping[str, Tensor]
) -> Tensor:
    message = torch.zeros(_length(layout), dtype=torch.uint8, device=comm.device)
    for name, view in layout.by_name(layout.flats(message)).items():
        copy_scaled(name, layout.extras[name], view, 1.0 / comm.world_size)
    for piece, views in zip(layout.pieces, layout.rows(message), strict=True):
        if views is not None:
            views.fill(rows[piece.slot])
    return message


class Conclusion:
    """What all ranks of a site tell each other of their shares.

    Args:
        shares: which rank had what.
        comm: to the ranks of this site.
        own: this rank's outcome.
    """

    def __init__(self, shares: Sequence[Model], comm: TorchComm, own: ShareOutcome) -> None:
        self._shares, self._comm, self._own = shares, comm, own
        told = comm.control(own.numbers(shares[comm.rank]))
        sizes = [2 + len(share.params) + len(share.units) for share in shares]
        self._numbers = [part.tolist() for part in comm.all_gather(told, sizes).wait()]

    @property
    def fates(self) -> list[Fate]:
        """Of each rank's share."""
        return [fate_of(numbers[0], rank) for rank, numbers in enumerate(self._numbers)]

    def tap_next(self) -> dict[Unit, bool]:
        """Of all units."""
        pairs = zip(self._shares, self._numbers, strict=True)
        marked = ((s.units, n[2 + len(s.params) :]) for s, n in pairs)
        return {u: bool(w) for units, ws in marked for u, w in zip(units, ws, strict=True)}

    def gradients(self) -> tuple[dict[str, Tensor], dict[Unit, Reason]]:
        """The mean gradients of all ranks' shares, and how their units travelled if that is new."""
        comm, layouts = self._comm, [self._layout(rank) for rank in range(len(self._shares))]
        own = layouts[comm.rank]
        message = torch.zeros(_length(own), dtype=torch.uint8, device=comm.device)
        for name, view in own.by_name(own.flats(message)).items():
            copy_scaled(name, own.extras[name], view, 1.0)
        for view in own.blobs(message):
            if view is not None:
                view.copy_(torch.frombuffer(bytearray(self._own.text), dtype=torch.uint8))
        arrived = comm.all_gather(message, [_length(layout) for layout in layouts]).wait()
        means: dict[str, Tensor] = {}
        reasons: dict[Unit, Reason] = {}
        triples = zip(self._shares, layouts, arrived, strict=True)
        for rank, (share, layout, part) in enumerate(triples):
            means.update(layout.by_name(layout.flats(part)))
            text = layout.blobs(part)[0]
            if text is not None:
                told = told_reasons(text.cpu().numpy().tobytes(), rank, len(share.units))
                reasons.update(zip(share.units, told, strict=True))
        return means, reasons

    def _layout(self, rank: int) -> Layout:
        share, (_, length, *flags) = self._shares[rank], self._numbers[rank]
        if not 0 <= length < _MOST_TEXT:
            raise ExchangeError(f"local rank {rank} announced {length} bytes of words")
        pairs = zip(share.params.items(), flags[: len(share.params)], strict=True)
        return Layout(0, {name: p for (name, p), used in pairs if used}, [], [length])
