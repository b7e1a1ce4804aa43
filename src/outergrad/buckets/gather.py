"""Factors of several layers in an all-gather."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outergrad.buckets.bucket import Pending, Result, StepContext
from outergrad.buckets.message import RowBucket, book_received, sums_of_extras
from outergrad.core.transport import Work
from outergrad.linalg.gradients import add_gradients
from outergrad.messages.checksum import combined
from outergrad.messages.layout import Layout, factors_of
from outergrad.messages.wire import Preamble, State, read_all


class FactorBucket:
    """Units whose factors, or triplets, travel in one all-gather, straight from site to site.

    Small gradients may ride along: one message less, and one delay instead of a ring's 2 (S - 1).

    Args:
        row_bucket: what it carries.
    """

    def __init__(self, row_bucket: RowBucket) -> None:
        self.row_bucket = row_bucket
        self.params, self.dense_params = row_bucket.params, row_bucket.dense_params

    def expect(self, context: StepContext) -> None:
        """The messages of the other sites."""
        context.comm.expect([layout.nbytes for layout in self._layouts(context)])

    def start(self, context: StepContext) -> Pending:
        """Computes and packs this site's factors and starts the all-gather."""
        comm, row_bucket, layouts = context.comm, self.row_bucket, self._layouts(context)
        own = layouts[comm.rank]
        message = torch.zeros(own.nbytes, dtype=torch.uint8, device=comm.device)
        if context.state == State.GOOD:
            row_bucket.pack(context, own, message, "factors", comm.world_size - 1)
            if row_bucket.blocks:
                row_bucket.pack_blocks(context, own, message, comm.world_size - 1)
            book_received(context, layouts, "factors", row_bucket.blocks)
        preamble = row_bucket.preamble(context)
        preamble.write(message)
        work = comm.all_gather(message, [layout.nbytes for layout in layouts])
        return _FactorPending(work, row_bucket, layouts, preamble, context)

    def _layouts(self, context: StepContext) -> list[Layout]:
        """Of every site's message."""
        row_bucket = self.row_bucket
        pairs = zip(row_bucket.pieces(context), context.headers, strict=True)
        return [row_bucket.layout(p, blobs=row_bucket.blobs(context, site)) for p, site in pairs]


class _FactorPending:
    def __init__(
        self,
        work: Work,
        row_bucket: RowBucket,
        layouts: Sequence[Layout],
        expected: Preamble,
        context: StepContext,
    ) -> None:
        self._work, self._row_bucket, self._layouts = work, row_bucket, layouts
        self._expected, self._context = expected, context

    def advance(self) -> None:
        """A single round."""

    def wait(self) -> Result:
        messages, context, row_bucket = self._work.wait(), self._context, self._row_bucket
        preambles, state = read_all(messages, self._expected)
        digest = combined(preamble.total for preamble in preambles)
        if state != State.GOOD:
            return Result(state=state, digest=digest)
        has_autograd_grad = row_bucket.agree(preambles)
        means: dict[str, Tensor] = {}
        additions: dict[str, Tensor] = {}
        parts_KS = zip(*factors_of(self._layouts, messages, context.comm.rank), strict=True)
        for (slot, tapped), parts_S in zip(row_bucket.tapped.items(), parts_KS, strict=True):
            parts, share = [part for part in parts_S if part is not None], 1 / len(parts_S)
            if context.reading is not None:
                context.reading.record_mean(slot, parts, share)
            if parts:
                add_gradients(additions if tapped else means, slot, parts, context.params, share)
        if row_bucket.blocks:
            additions.update(self._computed_again(messages))
        if row_bucket.extras:
            means.update(sums_of_extras(self._layouts, messages))
        return Result(means, additions, state, has_autograd_grad, digest)

    def _computed_again(self, messages: Sequence[Tensor]) -> dict[str, Tensor]:
        """The mean gradients of blocks, which every site computes for all sites."""
        pairs = zip(self._layouts, messages, strict=True)
        blobs_BS = zip(*(layout.blobs(message) for layout, message in pairs), strict=True)
        gradients: dict[str, Tensor] = {}
        for block, data_S in zip(self._row_bucket.blocks, blobs_BS, strict=True):
            gradients.update(self._context.computed_again(block, data_S))
        return gradients
