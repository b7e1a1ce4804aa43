"""Pooling: each rank of a site reduces one share of the model for all ranks of its site."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from outergrad.buckets.bucket import copy_scaled
from outergrad.buckets.message import sums_of_extras
from outergrad.core.cost import CostModel
from outergrad.core.model import Compressors, Model, part_of
from outergrad.core.owners import owners
from outergrad.core.reasons import Reason
from outergrad.core.transport import Comm
from outergrad.core.types import Factors, Slot, Unit
from outergrad.messages.header import Header, Join, SlotUse
from outergrad.messages.layout import Layout
from outergrad.messages.wire import Piece
from outergrad.planning.plan import Planner
from outergrad.session.mesh.rank_reports import Report
from outergrad.step.captured import Captured

LEAST_BYTES = 16
"""Least length of a message: a transport may not like empty ones."""


def shares(model: Model, ranks: int, *, whole: bool = False) -> list[Model]:
    """Divides a model into the shares that the ranks of a site take to the other sites.

    Args:
        model: what is shared.
        ranks: number of ranks of a site.
        whole: whether the first rank takes all; else the shares are of about the same size.
    """
    sizes: dict[tuple[str, ...], float] = {u.params: u.dense_numel for u in model.units}
    inside = {name for unit in model.units for name in unit.params}
    sizes.update({(n,): p.numel() for n, p in model.params.items() if n not in inside})
    owner = owners(sizes, 1 if whole else ranks)
    names = [{n for key, rank in owner.items() if rank == r for n in key} for r in range(ranks)]
    return [part_of(model, names[rank]) for rank in range(ranks)]


class Pooling:
    """Decision of what is pooled as rows and what as gradients, the same on all ranks of a site.

    It follows from the reports of all ranks. Rows of the ranks are concatenated, so that a method
    can do with them all that it does with factors. Where one rank has not captured the rows of a
    unit, all ranks form their gradients, which are summed.

    Args:
        model: what is shared.
        shares: per rank, the share that it pools.
        reports: of the ranks of this site.

    Attributes:
        used: parameters that some rank has a gradient for.
        formed: parameters of `used` that are pooled as gradients.
        weight: how much the site's gradient counts beside those of the others.
    """

    def __init__(self, model: Model, shares: Sequence[Model], reports: Sequence[Report]) -> None:
        self._params, self._shares, self._reports = model.params, shares, reports
        self.weight = sum(report.header.weight for report in reports)
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
        return [report.header.uses[self._index[slot]] for report in self._reports]

    def scale(self, rank: int) -> float:
        """Returns the factor of a rank's gradient in the mean over its site."""
        own = self._reports[rank].header.weight
        return own / self.weight if self.weight else 0.0

    def weighted(self, d_GRO: Tensor, rank: int) -> Tensor:
        """Scales a rank's deltas for the mean over its site; at weight 0 even NaN become zeros."""
        own = self._reports[rank].header.weight
        return d_GRO / (self.weight / own) if own else torch.zeros_like(d_GRO)

    def use(self, slot: Slot) -> SlotUse:
        """Returns how the site as a whole uses a slot."""
        uses = self._uses(slot)
        return SlotUse(sum(use.rows for use in uses), slot in self._of_rows, _dtype(uses))

    def header(self, header: Header, share: Model) -> Header:
        """Returns the header in which a rank announces its share for the whole site.

        Args:
            header: of this rank, about the whole model.
            share: the rank's share of the model.
        """
        used = tuple(name in self.used for name in share.params)
        uses = tuple(map(self.use, share.slots))
        joins = [report.header.join for report in self._reports]
        # The minimum: a site is inside of join() while one of its ranks has a batch.
        join = Join.GONE if Join.GONE in joins else min(joins)
        masks = zip(*(report.header.buffers for report in self._reports), strict=True)
        own = {"weight": self.weight, "join": join, "buffers": tuple(map(any, masks))}
        whole = any(report.header.whole for report in self._reports)
        return replace(header, used=used, uses=uses, whole=whole, **own)

    @property
    def active(self) -> list[int]:
        """Ranks of the site that still have a batch in `session.join()`."""
        reports = enumerate(self._reports)
        return [rank for rank, report in reports if report.header.join == Join.INSIDE]

    def layout(self, rank: int, owner: int) -> Layout:
        """Returns the layout of the message of a rank for the one that pools a share."""
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
    pooling: Pooling, comm: Comm, captured: Captured
) -> tuple[dict[str, Tensor], dict[Slot, list[Factors]]]:
    """Sends every rank what it pools; returns mean gradients and rows of this rank's share.

    Args:
        pooling: what is sent how.
        comm: to the ranks of this site.
        captured: has this rank's rows.
    """
    ranks = range(comm.world_size)
    scale = pooling.scale(comm.rank)
    outgoing = [_filled(pooling.layout(comm.rank, o), comm, captured, scale) for o in ranks]
    layouts = [pooling.layout(rank, comm.rank) for rank in ranks]
    arrived = comm.all_to_all(outgoing, [message_bytes(layout) for layout in layouts]).wait()
    stacked: dict[Slot, list[Factors]] = {}
    for rank, (layout, message) in enumerate(zip(layouts, arrived, strict=True)):
        for piece, factors in zip(layout.pieces, layout.gradients(message), strict=True):
            if isinstance(factors, Factors):
                own = factors._replace(d_GRO=pooling.weighted(factors.d_GRO, rank))
                stacked.setdefault(piece.slot, []).append(own)
    return sums_of_extras(layouts, arrived), stacked


def message_bytes(layout: Layout) -> int:
    """Returns the length of a message in bytes."""
    return max(layout.nbytes, LEAST_BYTES)


def _filled(layout: Layout, comm: Comm, captured: Captured, scale: float) -> Tensor:
    message = torch.zeros(message_bytes(layout), dtype=torch.uint8, device=comm.device)
    for name, view in layout.by_name(layout.flats(message)).items():
        copy_scaled(name, layout.extras[name], view, scale)
    for piece, views in zip(layout.pieces, layout.views(message), strict=True):
        if views is not None:
            views.fill(captured.rows(piece.slot, piece.rows))
    return message


class SharePlanner(Planner):
    """Planner of one rank's share: its methods commit residuals when the step of all shares counts.

    Args:
        shares: per rank of the site, the part of the model that it pools.
        rank: local rank of this one.
        compressors: of all units.
        cost: of the transport between the sites.
        own: names of parameters that stay inside the site.

    Attributes:
        between: the part of this rank's share that it takes to the other sites.
        known: per unit, how it travelled, as all ranks of the site know.
    """

    def __init__(
        self,
        shares: Sequence[Model],
        rank: int,
        compressors: Compressors,
        cost: CostModel,
        own: Set[str] = frozenset(),
    ) -> None:
        self.between = part_of(shares[rank], shares[rank].params.keys() - own)
        units = [unit for share in shares for unit in share.units]
        super().__init__(self.between, compressors, cost, units)
        self.shares, self._rank, self._own = shares, rank, own
        self.known: dict[Unit, Reason] = {}
        self._committed = True

    @property
    def share(self) -> Model:
        """Share of this rank."""
        return self.shares[self._rank]

    def of(self, model: Model) -> SharePlanner:
        """Returns the planner of a part of the model, which shares what this one has learnt."""
        parts = [part_of(share, model.params) for share in self.shares]
        part = SharePlanner(parts, self._rank, self._compressors, self._cost, self._own)
        part._has_autograd_grad = self._has_autograd_grad
        return part

    def commit(self, *, applied: bool) -> None:
        """Rolls back at once if the share is void; else waits for `conclude`."""
        self._committed = not applied
        if not applied:
            super().commit(applied=False)

    def conclude(self, *, applied: bool) -> None:
        """Commits or rolls back a share that has arrived, by whether all shares did."""
        if not self._committed:
            self._committed = True
            super().commit(applied=applied)
