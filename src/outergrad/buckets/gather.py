"""Factors of several layers in an all-gather."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from outergrad.buckets.bucket import Pending, Result, StepContext
from outergrad.buckets.message import RowBucket, book_received, sums_of_extras
from outergrad.core.reasons import Why
from outergrad.core.transport import Work
from outergrad.linalg.gradients import add_gradients
from outergrad.messages.checksum import combined
from outergrad.messages.layout import Layout, gradients_of
from outergrad.messages.wire import Preamble, State, read_all
from outergrad.replay.block_message import block_gradients


class FactorBucket(RowBucket):
    """Units whose factors, or triplets, travel in one all-gather, straight from site to site.

    Small gradients may ride along: one message less, and one delay instead of a ring's 2 (S - 1).
    """

    @property
    def travels(self) -> str:
        """What the payloads are called in statistics."""
        why = self._compressor.why
        return (Why.FACTORS if why == Why.LOW_RANK else why).value

    def expect(self, context: StepContext) -> None:
        """The messages of the other sites."""
        context.comm.expect([layout.nbytes for layout in self.layouts(context)])

    def start(self, context: StepContext) -> Pending:
        """Computes and packs this site's factors and starts the all-gather."""
        comm, layouts = context.comm, self.layouts(context)
        own = layouts[comm.rank]
        message = torch.zeros(own.nbytes, dtype=torch.uint8, device=comm.device)
        if context.state == State.GOOD:
            self.pack(context, own, message, self.travels, comm.cost.copies)
            if self.blocks:
                self.pack_blocks(context, own, message, comm.cost.copies)
            book_received(context, layouts, self.travels, self.blocks)
        preamble = self.preamble(context)
        preamble.write(message)
        work = comm.all_gather(message, [layout.nbytes for layout in layouts])
        return _FactorPending(work, self, layouts, preamble, context)

    def layouts(self, context: StepContext) -> list[Layout]:
        """Of every site's message."""
        pairs = zip(self.pieces(context), context.headers, strict=True)
        return [self.layout(pieces, blobs=self.blobs(context, site)) for pieces, site in pairs]


class _FactorPending(Pending):
    def __init__(
        self,
        work: Work,
        bucket: FactorBucket,
        layouts: Sequence[Layout],
        expected: Preamble,
        context: StepContext,
    ) -> None:
        self._work, self._bucket, self._layouts = work, bucket, layouts
        self._expected, self._context = expected, context

    def wait(self) -> Result:
        messages, context, bucket = self._work.wait(), self._context, self._bucket
        preambles, state = read_all(messages, self._expected)
        digest = combined(preamble.total for preamble in preambles)
        if state != State.GOOD:
            return Result(state=state, digest=digest)
        has_autograd_grad = bucket.agree(preambles)
        means: dict[str, Tensor] = {}
        additions: dict[str, Tensor] = {}
        parts_KS = zip(*gradients_of(self._layouts, messages, context.comm.rank), strict=True)
        for (slot, tapped), parts_S in zip(bucket.tapped.items(), parts_KS, strict=True):
            parts, share = [part for part in parts_S if part is not None], 1 / len(parts_S)
            if context.reading is not None:
                context.reading.record_mean(slot, parts, share)
            if parts:
                add_gradients(additions if tapped else means, slot, parts, context.params, share)
        if bucket.blocks:
            additions.update(self._computed_again(messages))
        if bucket.extras:
            means.update(sums_of_extras(self._layouts, messages))
        return Result(means, additions, state, has_autograd_grad, digest)

    def _computed_again(self, messages: Sequence[Tensor]) -> dict[str, Tensor]:
        """The mean gradients of blocks, which every site computes for all sites."""
        pairs = zip(self._layouts, messages, strict=True)
        blobs_BS = zip(*(layout.blobs(message) for layout, message in pairs), strict=True)
        context, rank = self._context, self._context.comm.rank
        gradients: dict[str, Tensor] = {}
        for block, data_S in zip(self._bucket.blocks, blobs_BS, strict=True):
            began = time.perf_counter()
            found = block_gradients(context.blocks[block], data_S, 1 / len(data_S), rank)
            context.add(block.name, "replayed", replay_s=time.perf_counter() - began)
            gradients.update({name: g.to(context.params[name].dtype) for name, g in found.items()})
        return gradients
