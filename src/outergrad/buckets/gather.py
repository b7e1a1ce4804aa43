"""Factors of several layers in an all-gather."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from outergrad.buckets.bucket import Pending, Result, StepContext
from outergrad.buckets.message import (
    RowBucket,
    book_received,
    digest_of,
    factors_of,
    read_all,
    sums_of_extras,
)
from outergrad.core.transport import Work
from outergrad.core.types import Factors
from outergrad.linalg.gradients import add_gradients
from outergrad.messages.layout import Layout
from outergrad.messages.wire import Preamble, State


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
            row_bucket.pack_blocks(context, own, message, comm.world_size - 1)
            book_received(context, layouts, "factors", row_bucket.blocks)
        preamble = row_bucket.preamble(context)
        preamble.write(message)
        work = comm.all_gather(message, [layout.nbytes for layout in layouts])
        return _FactorPending(work, self, layouts, preamble, context)

    def _layouts(self, context: StepContext) -> list[Layout]:
        """Of every site's message."""
        row_bucket = self.row_bucket
        return [
            row_bucket.layout(
                row_bucket.pieces(context, site), blobs=row_bucket.blobs(context, site)
            )
            for site in context.headers
        ]

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
        for k, slot in enumerate(self.row_bucket.slots):
            parts = [part for part in (parts_K[k] for parts_K in parts_SK) if part is not None]
            if parts and self.row_bucket.tapped[slot] == tapped:
                add_gradients(gradients, slot, parts, params, scale)
        return gradients


class _FactorPending:
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

    def advance(self) -> None:
        """A single round."""

    def wait(self) -> Result:
        messages, row_bucket = self._work.wait(), self._bucket.row_bucket
        preambles, state = read_all(messages, self._expected)
        if state != State.GOOD:
            return Result(state=state, digest=digest_of(preambles))
        row_bucket.agree(preambles)
        parts_SK = factors_of(self._layouts, messages, self._context.comm.rank)
        params, reading = self._context.params, self._context.reading
        if reading is not None:
            for slot, parts_S in zip(row_bucket.slots, zip(*parts_SK, strict=True), strict=True):
                reading.record_mean(slot, [p for p in parts_S if p is not None], 1 / len(parts_S))
        additions = self._bucket.gradients(parts_SK, params, tapped=True)
        additions.update(self._computed_again(messages))
        means = self._bucket.gradients(parts_SK, params, tapped=False)
        means.update(sums_of_extras(self._layouts, messages))
        has_autograd_grad = row_bucket.has_autograd_grad(preambles)
        return Result(means, additions, state, has_autograd_grad, digest_of(preambles))

    def _computed_again(self, messages: Sequence[Tensor]) -> dict[str, Tensor]:
        """The mean gradients of blocks, which every site computes for all sites."""
        pairs = zip(self._layouts, messages, strict=True)
        blobs_SB = [layout.blobs(message) for layout, message in pairs]
        gradients: dict[str, Tensor] = {}
        for k, block in enumerate(self._bucket.row_bucket.blocks):
            data_S = [blobs_B[k] for blobs_B in blobs_SB]
            gradients.update(self._context.computed_again(block, data_S))
        return gradients
