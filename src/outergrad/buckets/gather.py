"""Factors of several layers in an all-gather."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from outergrad.buckets.bucket import Pending, Result, Sender
from outergrad.buckets.message import (
    Cargo,
    book_received,
    digest_of,
    factors_of,
    read_all,
    sums_of_riders,
)
from outergrad.core.protocols import Work
from outergrad.core.types import Factors
from outergrad.linalg.gradients import add_gradients
from outergrad.messages.layout import Layout
from outergrad.messages.wire import Preamble, State


class FactorBucket:
    """Units whose factors, or triplets, travel in one all-gather, straight from site to site.

    Small gradients may ride along: one message less, and one delay instead of a ring's 2 (S - 1).

    Args:
        cargo: what it carries.
    """

    def __init__(self, cargo: Cargo) -> None:
        self.cargo = cargo
        self.params, self.dense_params = cargo.params, cargo.dense_params

    def expect(self, sender: Sender) -> None:
        """The messages of the other sites."""
        sender.comm.expect([layout.nbytes for layout in self._layouts(sender)])

    def start(self, sender: Sender) -> Pending:
        """Computes and packs this site's factors and starts the all-gather."""
        comm, cargo, layouts = sender.comm, self.cargo, self._layouts(sender)
        own = layouts[comm.rank]
        message = torch.zeros(own.nbytes, dtype=torch.uint8, device=comm.device)
        if sender.state == State.GOOD:
            cargo.pack(sender, own, message, "factors", comm.world_size - 1)
            cargo.pack_blocks(sender, own, message, comm.world_size - 1)
            book_received(sender, layouts, "factors", cargo.blocks)
        preamble = cargo.preamble(sender)
        preamble.write(message)
        work = comm.all_gather(message, [layout.nbytes for layout in layouts])
        return _FactorPending(work, self, layouts, preamble, sender)

    def _layouts(self, sender: Sender) -> list[Layout]:
        """Of every site's message."""
        cargo = self.cargo
        return [
            cargo.layout(cargo.pieces(sender, site), blobs=cargo.blobs(sender, site))
            for site in sender.headers
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
        for k, slot in enumerate(self.cargo.slots):
            parts = [part for part in (parts_K[k] for parts_K in parts_SK) if part is not None]
            if parts and self.cargo.tapped[slot] == tapped:
                add_gradients(gradients, slot, parts, params, scale)
        return gradients


class _FactorPending:
    def __init__(
        self,
        work: Work,
        bucket: FactorBucket,
        layouts: Sequence[Layout],
        expected: Preamble,
        sender: Sender,
    ) -> None:
        self._work, self._bucket, self._layouts = work, bucket, layouts
        self._expected, self._sender = expected, sender

    def advance(self) -> None:
        """A single round."""

    def wait(self) -> Result:
        messages, cargo = self._work.wait(), self._bucket.cargo
        preambles, state = read_all(messages, self._expected)
        if state != State.GOOD:
            return Result(state=state, digest=digest_of(preambles))
        cargo.agree(preambles)
        parts_SK = factors_of(self._layouts, messages, self._sender.comm.rank)
        params, reading = self._sender.params, self._sender.reading
        if reading is not None:
            for slot, parts_S in zip(cargo.slots, zip(*parts_SK, strict=True), strict=True):
                reading.came(slot, [p for p in parts_S if p is not None], 1 / len(parts_S))
        additions = self._bucket.gradients(parts_SK, params, tapped=True)
        additions.update(self._computed_again(messages))
        means = self._bucket.gradients(parts_SK, params, tapped=False)
        means.update(sums_of_riders(self._layouts, messages))
        mixed = cargo.mixed(preambles)
        return Result(means, additions, state, mixed, digest_of(preambles))

    def _computed_again(self, messages: Sequence[Tensor]) -> dict[str, Tensor]:
        """The mean gradients of blocks, which every site computes for all sites."""
        pairs = zip(self._layouts, messages, strict=True)
        blobs_SB = [layout.blobs(message) for layout, message in pairs]
        gradients: dict[str, Tensor] = {}
        for k, block in enumerate(self._bucket.cargo.blocks):
            data_S = [blobs_B[k] for blobs_B in blobs_SB]
            gradients.update(self._sender.computed_again(block, data_S))
        return gradients
