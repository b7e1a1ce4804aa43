"""Factors of several layers in an all-gather."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from outergrad._bucket import Pending, Result, Sender, copy_scaled
from outergrad._types import Exchange, Factors, Unit, Work
from outergrad.comm.wire import Header, Piece, Preamble, State, aligned
from outergrad.linalg.gradients import add_gradients


class FactorBucket:
    """Units whose factors travel in one all-gather, straight from each site to all others.

    Small gradients may ride along: one message less, and one delay instead of a ring's 2 (S - 1).

    Args:
        index: place of the message in the step.
        units: what travels as factors.
        exchange: makes the factors.
        riders: parameters whose `grad` travels as it is.
    """

    def __init__(
        self,
        index: int,
        units: Sequence[Unit],
        exchange: Exchange,
        riders: Mapping[str, nn.Parameter],
    ) -> None:
        self._names = tuple(name for unit in units for name in unit.params)
        self.params = frozenset([*self._names, *riders])
        self.dense_params: Sequence[str] = tuple(riders)
        self._riders = dict(riders)
        self._index, self._exchange = index, exchange
        self._rider_bytes = [aligned(p.numel() * p.element_size()) for p in riders.values()]
        self._slots = tuple(slot for unit in units for slot in unit.slots)
        self._start = Preamble.nbytes(len(self._names), len(self._slots))

    def start(self, sender: Sender) -> Pending:
        """Computes and packs this site's factors and starts the all-gather."""
        comm, header = sender.comm, sender.header
        layouts = [self._layout(sender, site) for site in sender.headers]
        message = torch.zeros(
            self._nbytes(layouts[comm.rank]), dtype=torch.uint8, device=comm.device
        )
        if sender.state == State.GOOD:
            self._pack(sender, layouts[header.rank], message)
        preamble = self._preamble(sender)
        preamble.write(message)
        work = comm.all_gather(message, [self._nbytes(layout) for layout in layouts])
        return _FactorPending(work, self, layouts, preamble, sender.params)

    def _preamble(self, sender: Sender) -> Preamble:
        header = sender.header
        flags = tuple(name in sender.mixed for name in self._names)
        wanted_rows = tuple(self._exchange.wanted_rows(slot) for slot in self._slots)
        own = (header.fingerprint, header.step, self._index, header.rank)
        return Preamble(*own, sender.state, flags, wanted_rows)

    def _layout(self, sender: Sender, site: Header) -> list[Piece]:
        """The pieces of one site's message, from the agreed rows and dtypes."""
        pieces = []
        for slot in self._slots:
            k = sender.slot_index[slot]
            used = [h.uses[k].dtype for h in sender.headers if h.uses[k].rows]
            dtype = used[0] if len(set(used)) == 1 else torch.float32
            rows = self._exchange.sent_rows(slot, site.uses[k].rows, site.rank)
            bias = dtype if self._exchange.sends_bias(slot) else None
            pieces.append(Piece(slot, rows, self._exchange.wire or dtype, bias))
        return pieces

    def _nbytes(self, layout: Iterable[Piece]) -> int:
        return self._start + sum(self._rider_bytes) + sum(piece.nbytes for piece in layout)

    def split(self, layout: Sequence[Piece], message: Tensor) -> list[Factors | None]:
        """Views of the pieces of a message."""
        start = self._start + sum(self._rider_bytes)
        parts = message[start:].split([piece.nbytes for piece in layout])
        pairs = zip(layout, parts, strict=True)
        return [piece.views(part) if piece.rows else None for piece, part in pairs]

    def _rider_views(self, message: Tensor) -> dict[str, Tensor]:
        parts = message[self._start :].split([*self._rider_bytes, self._rest(message)])
        pairs = zip(self._riders.items(), parts, strict=False)
        return {n: part[: p.nbytes].view(p.dtype).view(p.shape) for (n, p), part in pairs}

    def _rest(self, message: Tensor) -> int:
        return len(message) - self._start - sum(self._rider_bytes)

    def _pack(self, sender: Sender, layout: Sequence[Piece], message: Tensor) -> None:
        for name, view in self._rider_views(message).items():
            copy_scaled(name, self._riders[name], view, 1.0 / sender.comm.world_size)
            sender.add(name, "dense", view.nbytes * (sender.comm.world_size - 1))
        for piece, views in zip(layout, self.split(layout, message), strict=True):
            slot, began = piece.slot, time.perf_counter()
            if views is not None:
                raw = sender.factors_of(slot)
                factors = self._exchange.compress(slot, raw, piece.rows)
                _fill(views, factors)
            sent = piece.nbytes * (sender.comm.world_size - 1)
            sender.add(slot.layer or slot.weight, "factors", sent, time.perf_counter() - began)

    def agree(self, preambles: Sequence[Preamble]) -> None:
        """Hands on how many rows every site would send next time."""
        for site, preamble in enumerate(preambles):
            for slot, rows in zip(self._slots, preamble.wanted_rows, strict=True):
                self._exchange.agree(slot, site, rows)

    def mixed(self, preambles: Sequence[Preamble]) -> list[str]:
        """Parameters that some site flagged."""
        flags = zip(*(preamble.flags for preamble in preambles), strict=True)
        return [name for name, flag in zip(self._names, flags, strict=True) if any(flag)]

    def means(self, messages: Sequence[Tensor]) -> dict[str, Tensor]:
        """Sums of the riders, which every site has scaled."""
        first, *others = (self._rider_views(message) for message in messages)
        sums = {name: view.clone() for name, view in first.items()}
        for other in others:
            for name, view in other.items():
                sums[name] += view
        return sums

    def gradients(
        self, parts_SK: Sequence[Sequence[Factors | None]], params: Mapping[str, nn.Parameter]
    ) -> dict[str, Tensor]:
        """Mean gradients over the sites from every site's (S) factors of every slot (K)."""
        gradients: dict[str, Tensor] = {}
        scale = 1.0 / len(parts_SK)
        for k, slot in enumerate(self._slots):
            parts = [part for part in (parts_K[k] for parts_K in parts_SK) if part is not None]
            if parts:
                add_gradients(gradients, slot, parts, params, scale)
        return gradients


class _FactorPending:
    def __init__(
        self,
        work: Work,
        bucket: FactorBucket,
        layouts: Sequence[Sequence[Piece]],
        expected: Preamble,
        params: Mapping[str, nn.Parameter],
    ) -> None:
        self._work, self._bucket, self._layouts = work, bucket, layouts
        self._expected, self._params = expected, params

    def wait(self) -> Result:
        messages = self._work.wait()
        preambles = [Preamble.read(m, self._expected, rank) for rank, m in enumerate(messages)]
        state = max(preamble.state for preamble in preambles)
        if state != State.GOOD:
            return Result(state=state)
        self._bucket.agree(preambles)
        pairs = zip(self._layouts, messages, strict=True)
        parts_SK = [self._bucket.split(layout, message) for layout, message in pairs]
        additions = self._bucket.gradients(parts_SK, self._params)
        return Result(self._bucket.means(messages), additions, state, self._bucket.mixed(preambles))


def _fill(views: Factors, factors: Factors) -> None:
    """Copies factors into a message; fewer rows than agreed leave zeros."""
    rows = factors.d_GRO.shape[1]
    views.d_GRO[:, :rows].copy_(factors.d_GRO)
    (views.a_GRI[:rows] if views.a_GRI.dim() == 1 else views.a_GRI[:, :rows]).copy_(factors.a_GRI)
    if views.b_GO is not None and factors.b_GO is not None:
        views.b_GO.copy_(factors.b_GO)
