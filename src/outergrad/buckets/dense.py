"""Dense gradients concatenated in an all-reduce, as in DDP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from outergrad.buckets.bucket import Bucket, Pending, Result, StepContext
from outergrad.core.cost import CostModel
from outergrad.core.memory import holders
from outergrad.core.sent import Sent, Tap, Way
from outergrad.core.transport import TwoRounds, Work
from outergrad.linalg.finite import is_finite
from outergrad.messages.checksum import SummedRoom
from outergrad.messages.wire import State
from outergrad.record.stats import Booking

LARGE = 1 << 14
"""Number of elements from which on a pass over a gradient costs more than a few calls."""

_SMALL = 1 << 12
"""Elements of a gradient up to which one copy of all is cheaper than a product of each."""

_BUFFERS = 2


class DenseBucket(Bucket):
    """Parameters of one dtype whose gradients are sent in one all-reduce.

    Two buffers alternate, because the sum of a step is kept during the next one. Their last two
    elements count sites: those whose batch does not fit the plan, plus a small fraction for each
    that has no gradient for an announced parameter; and those whose step is void.
    """

    adds_up = True

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self.params = frozenset(params)
        self.dense_params: Sequence[str] = tuple(params)
        self._params = dict(params)
        self._buffers: list[_Buffer] = []
        self._share: tuple[float, Tensor] | None = None
        self._size = sum(p.numel() for p in params.values()) + 2
        self._dtype = next(iter(params.values())).dtype

    @property
    def is_view(self) -> bool:
        """True: the means are views of the sum's buffer."""
        return True

    @property
    def is_kept(self) -> bool:
        """True: the sum stays in its buffer."""
        return True

    def lengths(self, context: StepContext) -> object:
        """Returns the number of elements, with the two counts."""
        return self._size

    def expect(self, context: StepContext, turn: int) -> None:
        """Posts the receive of the sum, on a transport where sites add up themselves."""
        context.comm.expect_sum(self._size, turn, self._dtype)

    def start(self, context: StepContext) -> DensePending:
        """Copies `param.grad` (a missing one counts as zero) and starts the all-reduce."""
        kept = self._scratch(context.comm.cost)
        buffer, views = kept.room.tensor, kept.views
        self._fill(context, kept)
        if context.skips_bad and not is_finite(buffer[:-2]):
            for name, view in views.items():
                context.check(name, [view])
        kept.say(context.state, lacks=bool(context.lacking(self.params)))
        if context.comm.tap is not None:
            self._tell(context.comm.tap, context, views)
        work = context.comm.all_reduce(buffer)
        context.layers.book(kept.bookings)
        return DensePending(work, kept, context.comm.sum_rounds(buffer.nbytes))

    def _tell(self, tap: Tap, context: StepContext, views: Mapping[str, Tensor]) -> None:
        """Tells a tap this site's terms of the sum."""
        step, scale = context.header.step, context.comm.world_size
        for name, view in views.items():
            tap.sent(Sent(name=name, content=view, way=Way.SUMMED, step=step, scale=scale))

    def _scratch(self, cost: CostModel) -> _Buffer:
        """The buffer that the previous step does not use, or a new one if that one is lent."""
        if len(self._buffers) < _BUFFERS:
            self._buffers.insert(0, self._buffer(cost))
        else:
            self._buffers.reverse()
        if self._buffers[0].is_lent:
            self._buffers[0] = self._buffer(cost)
        return self._buffers[0]

    def _buffer(self, cost: CostModel) -> _Buffer:
        """A new buffer; its storage's users are counted after the temporaries of `of` are gone."""
        made = _Buffer.of(self._params, cost)
        made.holders = holders(made.told)
        return made

    def _fill(self, context: StepContext, kept: _Buffer) -> None:
        grads = [p.grad for p in self._params.values()]
        there = [g for g in grads if g is not None and not g.is_sparse]
        if len(there) < len(grads) or not context.adds_all_alike():
            for name, view in kept.views.items():
                context.fill(name, self._params[name], view)
        elif kept.room.tensor.numel() < _SMALL * len(grads):
            torch._foreach_copy_(list(kept.views.values()), there)  # type: ignore[attr-defined]
            kept.room.tensor[:-2].mul_(context.share)
        else:
            share = self._factor(context.share)
            for view, g in zip(kept.views.values(), there, strict=True):
                torch.mul(g, share, out=view)

    def _factor(self, share: float) -> Tensor | float:
        """The share as a tensor, which is made once and not in each product.

        For 16-bit gradients it stays a number: a tensor of their dtype would round it.
        """
        if self._dtype not in (torch.float32, torch.float64):
            return share
        if self._share is None or self._share[0] != share:
            self._share = share, torch.tensor(share, dtype=self._dtype)
        return self._share[1]


@dataclass
class _Buffer:
    """Memory of an all-reduce.

    Attributes:
        room: all of it.
        views: the part of each parameter, in its shape.
        told: the two counts behind them; their real part if gradients are complex.
        bookings: statistics of the message, per parameter.
        holders: tensors in its storage while no gradient of the loop is a view of it.
    """

    room: SummedRoom
    views: Mapping[str, Tensor]
    told: Tensor
    bookings: Sequence[Booking]
    holders: int = 0

    @property
    def is_lent(self) -> bool:
        """True if the training loop still has a gradient that is a view of this buffer."""
        return holders(self.told) > self.holders

    def say(self, state: State, *, lacks: bool) -> None:
        """Writes this site's contribution to the two counts."""
        self.told.zero_()
        if state != State.GOOD or lacks:
            self.told[0], self.told[1] = state.counts(lacks=lacks)

    @staticmethod
    def of(params: Mapping[str, nn.Parameter], cost: CostModel) -> _Buffer:
        sizes = [p.numel() for p in params.values()]
        first = next(iter(params.values()))
        room = SummedRoom(first, sum(sizes) + 2)
        pairs = zip(params.items(), room.tensor[:-2].split(sizes), strict=True)
        views = {name: part.view(p.shape) for (name, p), part in pairs}
        traffic = {name: cost.all_reduce(view.nbytes) for name, view in views.items()}
        bookings = [Booking(name, "dense", *one) for name, one in traffic.items()]
        return _Buffer(room, views, room.tensor[-2:].real, bookings)


class DensePending(Pending):
    """An all-reduce under way.

    Args:
        work: the all-reduce.
        kept: the buffer of its sum.
        rounds: of the all-reduce.
    """

    def __init__(self, work: Work, kept: _Buffer, rounds: int) -> None:
        self._work, self._kept, self.rounds = work, kept, rounds
        self._result: Result | None = None

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """The views that will hold the sums, by parameter."""
        return self._kept.views

    def advance(self) -> None:
        """Starts the second round of the all-reduce."""
        cast("TwoRounds", self._work).advance()

    def wait(self) -> Result:
        """Returns the means, and the worst state of all sites."""
        if self._result is None:
            self._work.wait()
            told = self._kept.told.tolist()
            digest = self._kept.room.checksum()  # now, while the sum is in the processor's cache
            state, lacks = State.of(*told), told[0] > 0.0
            self._result = Result(self._kept.views, state=state, digest=digest, lacks=lacks)
        return self._result

    @property
    def is_as_received(self) -> bool:
        """True if the sum is what was received; a gradient in its memory may have been changed."""
        digest = self.wait().digest
        assert digest is not None
        return int(self._kept.room.checksum()) == int(digest)
