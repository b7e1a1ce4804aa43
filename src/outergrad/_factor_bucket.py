"""Factors of several layers in an all-gather."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from outergrad._bucket import Load, Pending, Result, Sender, copy_scaled
from outergrad._types import Exchange, Factors, Work
from outergrad.comm.wire import Header, Piece, Preamble, State, aligned
from outergrad.linalg.gradients import add_gradients


class FactorBucket:
    """Units whose factors, or triplets, travel in one all-gather, straight from site to site.

    Small gradients may ride along: one message less, and one delay instead of a ring's 2 (S - 1).

    Args:
        index: place of the message in the step.
        loads: what travels as factors.
        exchange: makes the factors.
        riders: parameters whose `grad` travels as it is.
    """

    def __init__(
        self,
        index: int,
        loads: Sequence[Load],
        exchange: Exchange,
        riders: Mapping[str, nn.Parameter],
    ) -> None:
        self._names = tuple(name for load in loads for name in load.unit.params)
        formed = [name for load in loads if not load.tapped for name in load.unit.params]
        self.params = frozenset([*self._names, *riders])
        self.dense_params: Sequence[str] = tuple(dict.fromkeys([*formed, *riders]))
        self._riders = dict(riders)
        self._index, self._exchange = index, exchange
        self._rider_bytes = [aligned(p.numel() * p.element_size()) for p in riders.values()]
        self._tapped = {slot: load.tapped for load in loads for slot in load.slots}
        self._slots = tuple(self._tapped)
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
        used, pieces = sender.used(), []
        for slot, tapped in self._tapped.items():
            if tapped:
                k = sender.slot_index[slot]
                rows, dtype = site.uses[k].rows, _delta_dtype(k, sender.headers)
            else:
                rows = slot.outputs if slot.weight in used else 0
                dtype = sender.params[slot.weight].dtype
            rows = self._exchange.sent_rows(slot, rows, site.rank) if rows else 0
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
                gradient = sender.gradient_of(slot, tapped=self._tapped[slot])
                _fill(views, self._exchange.compress(slot, gradient, piece.rows))
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
        """Means of the riders, which every site has scaled."""
        first, *others = (self._rider_views(message) for message in messages)
        sums = {name: view.clone() for name, view in first.items()}
        for other in others:
            for name, view in other.items():
                sums[name] += view
        return sums

    def gradients(
        self,
        parts_SK: Sequence[Sequence[Factors | None]],
        params: Mapping[str, nn.Parameter],
        *,
        tapped: bool,
    ) -> dict[str, Tensor]:
        """Mean gradients over the sites from every site's (S) factors of every slot (K).

        Args:
            parts_SK: the factors, None where a site has no rows.
            params: by name.
            tapped: of the slots that were tapped, or of the formed gradients.
        """
        gradients: dict[str, Tensor] = {}
        scale = 1.0 / len(parts_SK)
        for k, slot in enumerate(self._slots):
            parts = [part for part in (parts_K[k] for parts_K in parts_SK) if part is not None]
            if parts and self._tapped[slot] == tapped:
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

    def advance(self) -> None:
        """A single round."""

    def wait(self) -> Result:
        messages = self._work.wait()
        preambles = [Preamble.read(m, self._expected, rank) for rank, m in enumerate(messages)]
        state = max(preamble.state for preamble in preambles)
        if state != State.GOOD:
            return Result(state=state)
        self._bucket.agree(preambles)
        pairs = zip(self._layouts, messages, strict=True)
        parts_SK = [self._bucket.split(layout, message) for layout, message in pairs]
        additions = self._bucket.gradients(parts_SK, self._params, tapped=True)
        means = self._bucket.gradients(parts_SK, self._params, tapped=False)
        means.update(self._bucket.means(messages))
        return Result(means, additions, state, self._bucket.mixed(preambles))


def _delta_dtype(k: int, headers: Sequence[Header]) -> torch.dtype:
    """What the deltas of a slot have in common on the sites that have some."""
    used = {header.uses[k].dtype for header in headers if header.uses[k].rows}
    return used.pop() if len(used) == 1 else torch.float32


def _fill(views: Factors, factors: Factors) -> None:
    """Copies factors into a message; fewer rows than agreed leave zeros."""
    rows = factors.d_GRO.shape[1]
    views.d_GRO[:, :rows].copy_(factors.d_GRO)
    (views.a_GRI[:rows] if views.a_GRI.dim() == 1 else views.a_GRI[:, :rows]).copy_(factors.a_GRI)
    if views.b_GO is not None and factors.b_GO is not None:
        views.b_GO.copy_(factors.b_GO)
