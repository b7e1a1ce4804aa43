"""Payloads sent to one owner that merges them, and merged payloads sent to all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from outergrad.buckets.bucket import Gathered, Load, Pending, Result, StepContext
from outergrad.buckets.message import (
    BookedLayout,
    RowBucket,
    book_received,
    sums_of_extras,
    told,
)
from outergrad.core.compressor import Compressor
from outergrad.core.errors import ExchangeError, RefusedError
from outergrad.core.payload import Arrived, Payload
from outergrad.core.sent import Kind, Tap, Way
from outergrad.core.transport import Comm, TwoRounds, Work
from outergrad.core.types import Slot
from outergrad.linalg.gradients import add_gradients
from outergrad.messages.checksum import combined
from outergrad.messages.layout import Layout, gradients_of
from outergrad.messages.wire import Piece, State, read_all

_SECOND_LANE = 5
"""Lane of second rounds alone. They are skipped where a step fails, and no later message of the
step may then match the receives that were posted for them."""


class TwoWayBucket(RowBucket):
    """Units whose payloads go from each site to the owner of the slot, and merged ones to all.

    The paper's star with an aggregator, but every site is the aggregator of some slots. A site
    sends about 2 (S - 1) / S times its payloads, as in an all-reduce, in two delays instead of the
    four of two sketches. In the first round every site hears from every other, even if only its
    preamble. So all sites know alike whether there is a second round.

    Where few owners merge for many sites, the second round goes in pieces: an owner sends each site
    a piece of its message, and in a third round every site passes on the pieces that it has got.
    The messages are the same, so the gradients are, too.

    Args:
        index: as of `RowBucket`.
        loads: as of `RowBucket`.
        compressor: makes the payloads; its merger does the owners' work.
        extras: as of `RowBucket`.
        owners: the site that sums each extra, and that merges each slot for which the merger names
            no owner.
        in_pieces: whether merged messages go in pieces, on a transport that can do so.
    """

    def __init__(
        self,
        index: int,
        loads: Sequence[Load],
        compressor: Compressor,
        extras: Mapping[str, nn.Parameter],
        owners: Mapping[Slot | str, int],
        *,
        in_pieces: bool = False,
    ) -> None:
        super().__init__(index, loads, compressor, extras)
        assert compressor.merger is not None
        self.merger, self._owners = compressor.merger, owners
        self._in_pieces = in_pieces

    way = Way.OWNED

    @property
    def travels(self) -> str:
        """Name of the payloads in statistics."""
        return self._compressor.why.value

    @property
    def is_kept(self) -> bool:
        """True: the merged messages are kept."""
        return True

    def lengths(self, context: StepContext) -> object:
        """Returns what determines the layouts, with the owners."""
        return super().lengths(context), self.mergers(), self._owners, self._in_pieces

    def expect(self, context: StepContext, turn: int) -> None:
        """Posts the receives of all rounds."""
        pieces_SK, sites = self.pieces(context), range(context.comm.world_size)
        owners_K = self.mergers()
        theirs = [self.owned(pieces_K, owners_K, context.comm.rank) for pieces_K in pieces_SK]
        context.comm.expect([layout.nbytes for layout in theirs], turn)
        merged_K = self.merged_pieces(pieces_SK)
        merged = [self.owned(merged_K, owners_K, owner).nbytes for owner in sites]
        if self.in_pieces(context.comm):
            context.comm.expect_in_pieces(merged, turn, lane=_SECOND_LANE)
        else:
            context.comm.expect(merged, turn, lane=_SECOND_LANE)

    def start(self, context: StepContext) -> Pending:
        """Computes and packs this site's payloads and starts to send them to their owners."""
        return _TwoWayPending(self, context)

    def in_pieces(self, comm: Comm) -> bool:
        """True if merged messages go in pieces; the same on every site."""
        return self._in_pieces and comm.passes_on

    def mergers(self) -> list[int]:
        """Returns the owner of each slot (K) in this step."""
        found = [(slot, self.merger.owner(slot)) for slot in self.slots]
        return [self._owners[slot] if owner is None else owner for slot, owner in found]

    def owned(self, pieces_K: Sequence[Piece], owners_K: Sequence[int], owner: int) -> BookedLayout:
        """Returns the layout of the message with one owner's slots and extras."""
        extras = {name: p for name, p in self.extras.items() if self._owners[name] == owner}
        pairs = zip(pieces_K, owners_K, strict=True)
        return self.layout([piece for piece, own in pairs if own == owner], extras)

    def merged_pieces(self, pieces_SK: Sequence[Sequence[Piece]]) -> list[Piece]:
        """Returns the merged piece of each slot (K), from the pieces of every site (S)."""
        return [self._merged_piece(pieces_S) for pieces_S in zip(*pieces_SK, strict=True)]

    def _merged_piece(self, pieces_S: Sequence[Piece]) -> Piece:
        rows_S = [piece.rows for piece in pieces_S]
        return replace(pieces_S[0], rows=self.merger.merged_rows(pieces_S[0].slot, rows_S))


class _TwoWayPending(Pending):
    """Computes all rounds' lengths before the first, whose `agree` changes the next step's."""

    def __init__(self, bucket: TwoWayBucket, context: StepContext) -> None:
        self._bucket, self._context = bucket, context
        self._rank, sites = context.comm.rank, range(context.comm.world_size)
        pieces_SK = bucket.pieces(context)
        merged_K, owners_K = bucket.merged_pieces(pieces_SK), bucket.mergers()
        self._ours = [bucket.owned(pieces_SK[self._rank], owners_K, owner) for owner in sites]
        self._theirs = [bucket.owned(pieces_K, owners_K, self._rank) for pieces_K in pieces_SK]
        self._merged = [bucket.owned(merged_K, owners_K, owner) for owner in sites]
        self._state, self._has_autograd_grad, self._digest = State.GOOD, list[str](), 0
        self._lacks, self._is_merged = False, False
        self._in_pieces = bucket.in_pieces(context.comm)
        self.rounds = 2 + self._in_pieces
        self._pieces: TwoRounds | None = None
        self._first = self._send()

    # -- the first round ------------------------------------------------------------------------

    def _send(self) -> Work:
        context, preamble = self._context, self._bucket.preamble(self._context)
        messages = [self._empty(layout) for layout in self._ours]
        if context.state == State.GOOD:
            for owner, (layout, message) in enumerate(zip(self._ours, messages, strict=True)):
                receivers = int(owner != self._rank)
                self._bucket.pack(context, layout, message, receivers, owner)
        lacks = bool(context.lacking(self._bucket.params))
        self._expected = replace(preamble, state=context.state, lacks=lacks)
        for message in messages:
            self._expected.write(message)
        return context.comm.all_to_all(messages, [layout.nbytes for layout in self._theirs])

    def _empty(self, layout: Layout) -> Tensor:
        return torch.zeros(layout.nbytes, dtype=torch.uint8, device=self._context.comm.device)

    # -- further rounds -------------------------------------------------------------------------

    def advance(self) -> None:
        """Starts the second round, and then the third, if there is one."""
        if self._pieces is not None:
            self._pieces.advance()
        elif not self._is_merged:
            self._is_merged = True
            self._start_second()

    def _start_second(self) -> None:
        """Merges the slots that this site owns and starts to send them to all.

        Raises:
            ExchangeError: a message is damaged, so that it is unknown whether there is a second
                round.
        """
        messages, bucket = self._first.wait(), self._bucket
        try:
            preambles, self._state = read_all(messages, self._expected)
        except RefusedError as error:
            sender = self._context.comm.sites[error.site]
            raise ExchangeError(f"from {sender.called}: {error}") from error
        self._digest = combined(preamble.said for preamble in preambles)
        if self._state != State.GOOD:
            return  # all sites know the same state, so none starts a second round
        self._has_autograd_grad = bucket.agree(preambles)
        self._lacks = any(preamble.lacks for preamble in preambles)
        merged = self._empty(self._merged[self._rank])
        self._merge(messages, merged)
        book_received(self._context, self._theirs)
        book_received(self._context, self._merged)
        self._expected = bucket.preamble(self._context, second=True)
        self._expected.write(merged)
        self.gathered = Gathered(self._send_merged(merged), merged)

    def _send_merged(self, merged: Tensor) -> Work:
        comm, sizes = self._context.comm, [layout.nbytes for layout in self._merged]
        if not self._in_pieces:
            return comm.all_gather(merged, sizes, lane=_SECOND_LANE)
        for layout in self._merged:  # of which this site passes on a piece to all others
            self._context.layers.book(layout.sent(self._in_all_pieces))
        self._pieces = comm.all_gather_in_pieces(merged, sizes, lane=_SECOND_LANE)
        return self._pieces

    @property
    def _in_all_pieces(self) -> float:
        """Part of a message that leaves this site in pieces: its own stays here."""
        sites = self._context.comm.world_size
        return (sites - 1) / sites

    def _merge(self, messages: Sequence[Tensor], merged: Tensor) -> None:
        layout = self._merged[self._rank]
        others = self._in_all_pieces if self._in_pieces else self._context.comm.cost.copies
        sums = sums_of_extras(self._theirs, messages)
        for name, view in layout.by_name(layout.flats(merged)).items():
            view.copy_(sums[name])
        parts_KS = zip(*gradients_of(self._theirs, messages, self._rank), strict=True)
        began = time.perf_counter()
        for piece, view, parts_S in zip(layout.pieces, layout.views(merged), parts_KS, strict=True):
            if view is not None:
                view.fill(self._merged_rows(piece, parts_S))
        compress_s = time.perf_counter() - began
        self._context.layers.book(layout.sent(others), compress_s=compress_s)
        if self._context.comm.tap is not None:
            self._tell(self._context.comm.tap, layout, merged)

    def _tell(self, tap: Tap, layout: Layout, merged: Tensor) -> None:
        """Tells a tap which means this site sends as an owner."""
        for one in told(layout, merged, Way.GATHERED, self._context.header.step):
            tap.sent(replace(one, kind=Kind.MERGED))

    def _merged_rows(self, piece: Piece, parts_S: Sequence[Arrived | None]) -> Payload:
        parts = [part for part in parts_S if part is not None]
        sites = self._context.comm.world_size
        return self._bucket.merger.merge(piece.slot, parts, piece.rows, sites)

    def wait(self) -> Result:
        """Returns the gradients from the messages of all owners."""
        if self._state != State.GOOD:
            return Result(state=self._state, digest=self._digest)
        assert self.gathered is not None
        messages = self.gathered.wait()
        preambles, state = read_all(messages, self._expected)
        digest = combined([self._digest, combined(preamble.total for preamble in preambles)])
        if state != State.GOOD:
            return Result(state=state, digest=digest)
        means: dict[str, Tensor] = {}
        additions: dict[str, Tensor] = {}
        parts_SK = gradients_of(self._merged, messages, self._rank)
        for layout, message, parts_K in zip(self._merged, messages, parts_SK, strict=True):
            means.update(layout.by_name(layout.flats(message)))
            self._add_gradients(layout, parts_K, means, additions)
        return Result(means, additions, state, self._has_autograd_grad, digest, self._lacks)

    def _add_gradients(
        self,
        layout: Layout,
        parts_K: Sequence[Arrived | None],
        means: dict[str, Tensor],
        additions: dict[str, Tensor],
    ) -> None:
        tapped, params = self._bucket.tapped, self._context.params
        reading = self._context.reading
        for piece, factors in zip(layout.pieces, parts_K, strict=True):
            if factors is not None:
                if reading is not None:
                    reading.record_mean(piece.slot, [factors], 1.0)
                into = additions if tapped[piece.slot] else means
                add_gradients(into, piece.slot, [factors], params, 1.0)
