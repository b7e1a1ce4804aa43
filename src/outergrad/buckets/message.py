"""Parts that all buckets of factors share, whichever sites their messages go to."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outergrad.buckets.bucket import Load, StepContext, UnitBucket
from outergrad.core.blocks import Block
from outergrad.core.coding import Codecs
from outergrad.core.compressor import Compressor
from outergrad.core.payload import BYTES, Arrived, Form, Payload
from outergrad.core.reasons import Why
from outergrad.core.sent import Sent, Tap, Way
from outergrad.core.types import Factors, Part, Slot, Source
from outergrad.linalg.gradients import as_gradient
from outergrad.messages.header import Header
from outergrad.messages.layout import Layout
from outergrad.messages.wire import Piece, Preamble, State
from outergrad.record.gauge import Reading
from outergrad.record.stats import Booking

_KEPT_LAYOUTS = 256
"""Number of cached layouts: a training run has few different ones, or nearly one per step."""


class _Agreed(NamedTuple):
    """Facts about a slot or block that all sites know before there is a message.

    Attributes:
        rows_S: number of rows that each site sends.
        kind: dtype, dtype of the bias, codecs and form of the payload.
    """

    rows_S: list[int]
    kind: tuple[torch.dtype, torch.dtype | None, Codecs, Form]


class RowBucket(UnitBucket):
    """A bucket of units that are sent as factors.

    Args:
        index: index of the bucket in the step.
        loads: the units.
        compressor: makes the factors.
        extras: parameters whose `grad` is sent uncompressed.

    Attributes:
        blocks: blocks that all sites replay.
        sources: sources of the payloads: the slots, then the blocks.
    """

    def __init__(
        self,
        index: int,
        loads: Sequence[Load],
        compressor: Compressor,
        extras: Mapping[str, nn.Parameter],
    ) -> None:
        super().__init__(loads, extras)
        self._index, self._compressor = index, compressor
        self.blocks = [load.unit.block for load in loads if load.unit.block is not None]
        self.sources: tuple[Source, ...] = (*self.slots, *self.blocks)
        self._layouts: dict[Hashable, BookedLayout] = {}
        self._headers: Sequence[Header] = ()
        self._agreed: list[_Agreed] = []
        self._pieces: Sequence[Sequence[Piece]] = ()
        self._phase: Hashable = None
        self._wanted_S: list[tuple[int, ...]] = []

    way = Way.GATHERED
    """Receivers of this site's message."""

    @property
    def travels(self) -> str:
        """Name of the payloads in statistics."""
        why = self._compressor.why
        return (Why.FACTORS if why == Why.LOW_RANK else why).value

    def preamble(self, context: StepContext, *, second: bool = False) -> Preamble:
        """Returns the preamble of this site's message; a second round has its own bucket number."""
        header = context.header
        flags = tuple(map(context.has_autograd_grad.__contains__, self.names))
        wanted_rows = tuple(map(self._compressor.wanted_rows, self.slots))
        bucket = -1 - self._index if second else self._index
        own = (header.fingerprint, header.step, bucket, header.rank)
        lacks = bool(context.lacking(self.params))
        return Preamble(*own, context.state, flags, wanted_rows, lacks=lacks)

    def pieces(self, context: StepContext) -> Sequence[Sequence[Piece]]:
        """Returns the payload sizes of every site (S) and source (K).

        As long as nothing changes it is the same object, so that callers can cache by identity.
        """
        if self._headers is not context.headers and not self._is_as_before(context.headers):
            before = self._agreed
            self._agreed = [self._agreed_of(source, context) for source in self.sources]
            if self._agreed != before or len(self._pieces) != len(context.headers):
                pairs = zip(self.sources, self._agreed, strict=True)
                pieces_KS = [[Piece(s, n, *a.kind) for n in a.rows_S] for s, a in pairs]
                self._pieces = list(zip(*pieces_KS, strict=True)) or [()] * len(context.headers)
        self._headers, self._phase = context.headers, self._compressor.phase
        return self._pieces

    def _is_as_before(self, headers: Sequence[Header]) -> bool:
        """True if nothing has changed, as far as can be told without looking at every source."""
        if self._compressor.adapts or self._compressor.phase != self._phase:
            return False
        before = self._headers
        if len(headers) != len(before):
            return False
        return all(map(is_, headers, before)) or all(map(_is_foreseen, headers, before))

    def lengths(self, context: StepContext) -> object:
        """Returns what determines the layout of every site's message."""
        return self.names, tuple(self.extras), self.pieces(context)

    def _agreed_of(self, slot: Source, context: StepContext) -> _Agreed:
        compressor, headers = self._compressor, context.headers
        if isinstance(slot, Block):
            uses = [header.uses[context.index[slot]] for header in headers]
            return _Agreed([use.rows for use in uses], (torch.uint8, None, (), BYTES))
        if self.tapped[slot]:
            k = context.index[slot]
            rows_S, dtype = [header.uses[k].rows for header in headers], _delta_dtype(k, headers)
        else:
            rows_S = [slot.outputs if slot.weight in context.used else 0] * len(headers)
            dtype = context.params[slot.weight].dtype
        bias, codecs = dtype if compressor.sends_bias(slot) else None, compressor.codecs(slot)
        sent_S = [compressor.sent_rows(slot, n, site) if n else 0 for site, n in enumerate(rows_S)]
        return _Agreed(sent_S, (dtype, bias, codecs, compressor.form))

    def layout(
        self, pieces: Sequence[Piece], extras: Mapping[str, nn.Parameter] | None = None
    ) -> BookedLayout:
        """Returns the layout of a message; extras are all of the bucket's if None."""
        extras = self.extras if extras is None else extras
        key = tuple(extras), tuple(pieces)
        if key not in self._layouts:
            if len(self._layouts) == _KEPT_LAYOUTS:
                self._layouts.clear()
            start = Preamble.nbytes(len(self.names), len(self.slots))
            self._layouts[key] = BookedLayout(start, extras, pieces, self.travels)
        return self._layouts[key]

    def pack(
        self,
        context: StepContext,
        layout: BookedLayout,
        message: Tensor,
        receivers: int,
        owner: int | None = None,
    ) -> None:
        """Writes this site's gradients of slots, and books them; stops if they are not finite.

        Args:
            context: this site.
            layout: of the message.
            message: zeros, to be filled.
            receivers: number of times that the message is sent.
            owner: the only site that gets it; None if all do.
        """
        if layout.extras:
            context.fill_all(layout.by_name(layout.flats(message)))
        began = time.perf_counter()
        filled = layout.filled(message, Slot)
        parts = [self._part(context, piece) for piece, _ in filled]
        if context.state != State.GOOD:
            return
        compressed = self._compressor.compress(parts)
        for (_, view), payload in zip(filled, compressed, strict=True):
            view.fill(payload)
        context.layers.book(layout.sent(receivers), compress_s=time.perf_counter() - began)
        if context.comm.tap is not None:
            self._tell(context.comm.tap, context, layout, message, owner)
        if context.reading is not None:
            for part, (piece, view), payload in zip(parts, filled, compressed, strict=True):
                self._measure(context.reading, part, piece, payload, view.read())
                if self.tapped[piece.slot]:
                    context.reading.samples(piece.slot, context.scale)

    def _tell(
        self,
        tap: Tap,
        context: StepContext,
        layout: BookedLayout,
        message: Tensor,
        owner: int | None,
    ) -> None:
        """Tells a tap what this site's message says."""
        scale = context.comm.world_size  # extras carry the share of a mean, rows do not
        for one in told(layout, message, self.way, context.header.step, scale):
            tap.sent(replace(one, owner=owner))

    def _measure(
        self, reading: Reading, part: Part, piece: Piece, payload: Payload, arrives: Arrived
    ) -> None:
        if isinstance(payload, Factors) and isinstance(arrives, Factors) and self._compressor.exact:
            reading.sent_all(part, payload, arrives if piece.codecs else None)
        else:
            reading.sent(part, self._compressor.residual(part.slot), as_gradient(arrives))

    def _part(self, context: StepContext, piece: Piece) -> Part:
        gradient = context.gradient_of(piece.slot, tapped=self.tapped[piece.slot])
        return Part(piece.slot, gradient, piece.rows)

    def agree(self, preambles: Sequence[Preamble]) -> list[str]:
        """Passes the row counts that every site would like to send next to the compressor.

        Returns:
            Parameters that also have a gradient outside their factors on some site.
        """
        wanted_S = [preamble.wanted_rows for preamble in preambles]
        if self._compressor.adapts or wanted_S != self._wanted_S:
            self._wanted_S = wanted_S
            for site, wanted in enumerate(wanted_S):
                for slot, rows in zip(self.slots, wanted, strict=True):
                    self._compressor.agree(slot, site, rows)
        flags = zip(*(preamble.flags for preamble in preambles), strict=True)
        return [name for name, flag in zip(self.names, flags, strict=True) if any(flag)]


def told(
    layout: Layout, message: Tensor, way: Way, step: int, scale: float = 1.0
) -> Iterator[Sent]:
    """Yields what a message says, for a tap: its extras, times `scale`, and its payloads."""
    about = {"way": way, "step": step}
    for name, extra in layout.by_name(layout.flats(message)).items():
        yield Sent(name=name, content=extra, scale=scale, **about)
    for piece, view in layout.filled(message, Slot):
        yield Sent(name=piece.slot.weight, content=view.read(), slot=piece.slot, **about)


class BookedLayout(Layout):
    """Layout of a message, with its statistics.

    Args:
        start: length of the preamble, bytes.
        extras: parameters, by name, whose gradients it holds whole.
        pieces: its payloads.
        travels: name of the rows in statistics.

    Attributes:
        received: statistics that a site books when it receives the message.
    """

    def __init__(
        self,
        start: int,
        extras: Mapping[str, nn.Parameter],
        pieces: Sequence[Piece],
        travels: str,
    ) -> None:
        super().__init__(start, extras, pieces)
        self._travels = travels
        self._sent: dict[float, list[Booking]] = {}
        self.received = [Booking(n, "dense", received=p.nbytes) for n, p in extras.items()]
        self.received += [Booking(*self._about(p), received=p.nbytes) for p in pieces]

    def sent(self, receivers: float) -> list[Booking]:
        """Bookings of a message sent `receivers` times; seconds are shared by matrix size.

        A part of a time stands for a part of the message.
        """
        if receivers not in self._sent:
            self._sent[receivers] = list(self._bookings(receivers))
        return self._sent[receivers]

    def _bookings(self, receivers: float) -> Iterator[Booking]:
        for name, p in self.extras.items():
            yield Booking(name, "dense", sent=int(p.nbytes * receivers), share=0.0)
        sizes = [0 if _is_block(p) or not p.rows else p.slot.numel for p in self.pieces]
        whole = sum(sizes) or 1
        for piece, size in zip(self.pieces, sizes, strict=True):
            rows, sent = 0 if _is_block(piece) else piece.rows, int(piece.nbytes * receivers)
            yield Booking(*self._about(piece), sent=sent, rows=rows, share=size / whole)

    def _about(self, piece: Piece) -> tuple[str, str]:
        return piece.slot.label, "replayed" if _is_block(piece) else self._travels


def _is_block(piece: Piece) -> bool:
    return isinstance(piece.slot, Block)


def sums_of_extras(layouts: Sequence[Layout], messages: Sequence[Tensor]) -> dict[str, Tensor]:
    """Sums the extras over the sites, in their order; every site has already applied its weight."""
    flats_S = [layout.flats(message) for layout, message in zip(layouts, messages, strict=True)]
    sums = [flat.clone() for flat in flats_S[0]]
    for flats in flats_S[1:]:
        for whole, flat in zip(sums, flats, strict=True):
            whole += flat
    return layouts[0].by_name(sums)


def book_received(context: StepContext, layouts: Sequence[BookedLayout]) -> None:
    """Books the messages of all other sites to this one, by the layouts of every site's message."""
    for rank, layout in enumerate(layouts):
        if rank != context.comm.rank:
            context.layers.book(layout.received)


def _is_foreseen(header: Header, before: Header) -> bool:
    """True if a header was not exchanged, but assumed to be that of the previous step."""
    return header.uses is before.uses and header.used is before.used


def _delta_dtype(k: int, headers: Sequence[Header]) -> torch.dtype:
    """Common dtype of a slot's deltas on the sites that have some; float32 if there is none."""
    used = {header.uses[k].dtype for header in headers if header.uses[k].rows}
    return used.pop() if len(used) == 1 else torch.float32
