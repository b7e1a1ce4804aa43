"""Factors of several layers in an all-gather."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from outergrad.buckets.bucket import Gathered, Pending, Result, StepContext
from outergrad.buckets.message import BookedLayout, RowBucket, book_received, sums_of_extras
from outergrad.core.blocks import Block
from outergrad.core.payload import Arrived
from outergrad.core.sent import Sent
from outergrad.linalg.gradients import add_gradients
from outergrad.messages.checksum import combined
from outergrad.messages.layout import Layout, gradients_of
from outergrad.messages.wire import Piece, Preamble, State, read_all
from outergrad.record.stats import Booking
from outergrad.replay.block_message import block_gradients
from outergrad.replay.block_use import Message


class FactorBucket(RowBucket):
    """Units whose factors or triplets are sent in one all-gather, directly from site to site.

    Small dense gradients may be added: one message fewer, with one delay, not a ring's 2 (S - 1).
    """

    _laid_out: tuple[Sequence[Sequence[Piece]], list[BookedLayout]] | None = None
    """The pieces of the last step, and their layouts."""

    @property
    def is_kept(self) -> bool:
        """True unless there are blocks, whose replay may differ from the forward."""
        return not self.blocks

    def expect(self, context: StepContext, turn: int) -> None:
        """Posts the receives of the other sites' messages."""
        context.comm.expect([layout.nbytes for layout in self.layouts(context)], turn)

    def start(self, context: StepContext) -> Pending:
        """Computes and packs this site's factors and starts the all-gather."""
        comm, layouts = context.comm, self.layouts(context)
        own = layouts[comm.rank]
        message = torch.zeros(own.nbytes, dtype=torch.uint8, device=comm.device)
        if context.state == State.GOOD:
            self.pack(context, own, message, comm.cost.copies)
            if self.blocks:
                self._pack_blocks(context, own, message)
            book_received(context, layouts)
        preamble = self.preamble(context)
        preamble.write(message)
        work = comm.all_gather(message, [layout.nbytes for layout in layouts])
        return _FactorPending(Gathered(work, message), self, layouts, preamble, context)

    def layouts(self, context: StepContext) -> list[BookedLayout]:
        """Returns the layout of every site's message; reused between steps that are alike."""
        pieces_SK = self.pieces(context)
        if self._laid_out is None or self._laid_out[0] is not pieces_SK:
            self._laid_out = pieces_SK, [self.layout(pieces_K) for pieces_K in pieces_SK]
        return self._laid_out[1]

    def _pack_blocks(self, context: StepContext, layout: Layout, message: Tensor) -> None:
        for piece, view in layout.filled(message, Block):
            sent, out = context.blocks.message(piece.slot), view.read()
            assert isinstance(out, Tensor)
            context.check(piece.slot.params[0], sent.tensors)
            sent.write(out, context.scale)
            if context.comm.tap is not None:
                runs, tensors = Message.read(out, context.blocks[piece.slot].codecs)
                deltas = [tensors[place] for run in runs for place in run["deltas"]]
                about = {"way": self.way, "step": context.header.step, "deltas": deltas}
                context.comm.tap.sent(Sent(name=piece.slot.name, content=tensors, **about))


class _FactorPending(Pending):
    def __init__(
        self,
        gathered: Gathered,
        bucket: FactorBucket,
        layouts: Sequence[Layout],
        expected: Preamble,
        context: StepContext,
    ) -> None:
        self.gathered, self._bucket, self._layouts = gathered, bucket, layouts
        self._expected, self._context = expected, context

    def _messages(self) -> list[Tensor]:
        assert self.gathered is not None
        return self.gathered.wait()

    def wait(self) -> Result:
        messages, context, bucket = self._messages(), self._context, self._bucket
        preambles, state = read_all(messages, self._expected)
        digest = combined(preamble.total for preamble in preambles)
        if state != State.GOOD:
            return Result(state=state, digest=digest)
        has_autograd_grad = bucket.agree(preambles)
        means: dict[str, Tensor] = {}
        additions: dict[str, Tensor] = {}
        parts_KS = zip(*gradients_of(self._layouts, messages, context.comm.rank), strict=True)
        for source, parts_S in zip(bucket.sources, parts_KS, strict=True):
            if isinstance(source, Block):
                additions.update(self._computed_again(source, parts_S))
                continue
            parts, share = [part for part in parts_S if part is not None], 1 / len(parts_S)
            if context.reading is not None:
                context.reading.record_mean(source, parts, share)
                context.reading.overlap(source, parts_S, context.comm.rank)
            if parts:
                into = additions if bucket.tapped[source] else means
                add_gradients(into, source, parts, context.params, share)
        if bucket.extras:
            means.update(sums_of_extras(self._layouts, messages))
        lacks = any(preamble.lacks for preamble in preambles)
        return Result(means, additions, state, has_autograd_grad, digest, lacks)

    def _computed_again(self, block: Block, sent_S: Sequence[Arrived | None]) -> dict[str, Tensor]:
        """The mean gradients of a block, computed by replaying it for all sites."""
        context, began = self._context, time.perf_counter()
        data_S = [data if isinstance(data, Tensor) else None for data in sent_S]
        tapped, rank = context.blocks[block], context.comm.rank
        found = block_gradients(tapped, data_S, 1 / len(data_S), rank)
        replay_s = time.perf_counter() - began
        context.layers.book([Booking(block.label, "replayed")], replay_s=replay_s)
        return {name: g.to(context.params[name].dtype) for name, g in found.items()}
