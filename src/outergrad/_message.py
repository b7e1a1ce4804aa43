"""What messages of factors have in common, whoever they go to."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outergrad._bucket import Carried, Load, Sender, copy_scaled
from outergrad._protocols import Exchange
from outergrad._types import Factors, Part, Slot
from outergrad.comm.wire import Header, Piece, Preamble, State, aligned


class Cargo(Carried):
    """What a bucket of factors carries.

    Args:
        index: place of the bucket in the step.
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
        super().__init__(loads, riders)
        self._index, self._exchange = index, exchange

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What is compressed."""
        return tuple(self.tapped)

    def preamble(self, sender: Sender, *, second: bool = False) -> Preamble:
        """What this site's message begins with; a second round has a number of its own."""
        header = sender.header
        flags = tuple(name in sender.mixed for name in self.names)
        wanted_rows = tuple(self._exchange.wanted_rows(slot) for slot in self.slots)
        bucket = -1 - self._index if second else self._index
        own = (header.fingerprint, header.step, bucket, header.rank)
        return Preamble(*own, sender.state, flags, wanted_rows)

    def pieces(self, sender: Sender, site: Header) -> list[Piece]:
        """What one site has, slot by slot, from the agreed rows and dtypes."""
        return [self._piece(slot, sender, site) for slot in self.slots]

    def _piece(self, slot: Slot, sender: Sender, site: Header) -> Piece:
        if self.tapped[slot]:
            k = sender.slot_index[slot]
            rows, dtype = site.uses[k].rows, _delta_dtype(k, sender.headers)
        else:
            rows = slot.outputs if slot.weight in sender.used else 0
            dtype = sender.params[slot.weight].dtype
        rows = self._exchange.sent_rows(slot, rows, site.rank) if rows else 0
        bias = dtype if self._exchange.sends_bias(slot) else None
        return Piece(slot, rows, self._exchange.wire or dtype, bias)

    def layout(
        self, pieces: Sequence[Piece], riders: Mapping[str, nn.Parameter] | None = None
    ) -> Layout:
        """A message of these pieces and riders, all of the bucket's if None."""
        start = Preamble.nbytes(len(self.names), len(self.slots))
        return Layout(start, self.riders if riders is None else riders, pieces)

    def pack(
        self, sender: Sender, layout: Layout, message: Tensor, travels: str, receivers: int
    ) -> None:
        """Fills a message with what this site has, and books it.

        Args:
            sender: this site.
            layout: where things stand.
            message: zeros.
            travels: what the rows are called in statistics.
            receivers: how many other sites the message is sent to.
        """
        for name, view in layout.rider_views(message).items():
            copy_scaled(name, layout.riders[name], view, 1.0 / sender.comm.world_size)
            sender.add(name, "dense", view.nbytes * receivers)
        began = time.perf_counter()
        pairs = zip(layout.pieces, layout.factors(message), strict=True)
        filled = [(piece, views) for piece, views in pairs if views is not None]
        parts = [self._part(sender, piece) for piece, _ in filled]
        for (_, views), factors in zip(filled, self._exchange.compress(parts), strict=True):
            fill(views, factors)
        book(sender, layout.pieces, travels, receivers, time.perf_counter() - began)

    def _part(self, sender: Sender, piece: Piece) -> Part:
        gradient = sender.gradient_of(piece.slot, tapped=self.tapped[piece.slot])
        return Part(piece.slot, gradient, piece.rows)

    def agree(self, preambles: Sequence[Preamble]) -> None:
        """Hands on how many rows every site would send next time."""
        for site, preamble in enumerate(preambles):
            for slot, rows in zip(self.slots, preamble.wanted_rows, strict=True):
                self._exchange.agree(slot, site, rows)

    def mixed(self, preambles: Sequence[Preamble]) -> list[str]:
        """Parameters that some site flagged."""
        flags = zip(*(preamble.flags for preamble in preambles), strict=True)
        return [name for name, flag in zip(self.names, flags, strict=True) if any(flag)]


@dataclass(frozen=True)
class Layout:
    """Where things stand in one message: the preamble, riders, the rows of slots.

    Attributes:
        start: length of the preamble, bytes.
        riders: by name.
        pieces: the rows.
    """

    start: int
    riders: Mapping[str, nn.Parameter]
    pieces: Sequence[Piece]

    @property
    def nbytes(self) -> int:
        """Length of the message."""
        return self._end_of_riders + sum(piece.nbytes for piece in self.pieces)

    @property
    def _end_of_riders(self) -> int:
        return self.start + sum(aligned(p.nbytes) for p in self.riders.values())

    def rider_views(self, message: Tensor) -> dict[str, Tensor]:
        """Views of the riders, in their own shapes."""
        sizes = [aligned(p.nbytes) for p in self.riders.values()]
        parts = message[self.start : self._end_of_riders].split(sizes)
        pairs = zip(self.riders.items(), parts, strict=False)  # no sizes still give one part
        return {n: part[: p.nbytes].view(p.dtype).view(p.shape) for (n, p), part in pairs}

    def factors(self, message: Tensor) -> list[Factors | None]:
        """Views of the pieces; None for those without rows."""
        parts = message[self._end_of_riders :].split([piece.nbytes for piece in self.pieces])
        pairs = zip(self.pieces, parts, strict=False)
        return [piece.views(part) if piece.rows else None for piece, part in pairs]


def read_all(messages: Sequence[Tensor], expected: Preamble) -> tuple[list[Preamble], State]:
    """The preambles of all sites, checked, and the worst of their states."""
    preambles = [Preamble.read(m, expected, rank) for rank, m in enumerate(messages)]
    return preambles, max(preamble.state for preamble in preambles)


def sums_of_riders(views: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Over the sites, in their order: every site has divided its own by their number."""
    first, *others = views
    sums = {name: view.clone() for name, view in first.items()}
    for other in others:
        for name, view in other.items():
            sums[name] += view
    return sums


def fill(views: Factors, factors: Factors) -> None:
    """Copies factors into a message; fewer rows than agreed leave zeros."""
    rows = factors.d_GRO.shape[1]
    views.d_GRO[:, :rows].copy_(factors.d_GRO)
    (views.a_GRI[:rows] if views.a_GRI.dim() == 1 else views.a_GRI[:, :rows]).copy_(factors.a_GRI)
    if views.b_GO is not None and factors.b_GO is not None:
        views.b_GO.copy_(factors.b_GO)


def book(
    sender: Sender, pieces: Sequence[Piece], travels: str, receivers: int, seconds: float
) -> None:
    """Books the bytes of each piece, and its share of the seconds: by the size of the matrix."""
    sizes = [piece.slot.numel if piece.rows else 0 for piece in pieces]
    whole = sum(sizes) or 1
    for piece, size in zip(pieces, sizes, strict=True):
        sender.add(piece.slot.label, travels, piece.nbytes * receivers, seconds * size / whole)


def _delta_dtype(k: int, headers: Sequence[Header]) -> torch.dtype:
    """What the deltas of a slot have in common on the sites that have some."""
    used = {header.uses[k].dtype for header in headers if header.uses[k].rows}
    return used.pop() if len(used) == 1 else torch.float32
