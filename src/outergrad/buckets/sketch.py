"""Sketches of gradients in one or two all-reduces; their bytes do not grow with the sites."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from outergrad.buckets.bucket import Load, Pending, Result, StepContext, UnitBucket
from outergrad.core.coding import sum_dtype
from outergrad.core.compressor import Compressor
from outergrad.core.payload import Arrived
from outergrad.core.sent import Kind, Sent, Tap, Way
from outergrad.core.transport import Comm, TwoRounds, Work
from outergrad.core.types import Factors, Gradient, Slot, bias_slot
from outergrad.linalg.gradients import add_gradients, add_rows
from outergrad.linalg.outer import row_sum
from outergrad.messages.checksum import checksum
from outergrad.messages.wire import State
from outergrad.record.stats import Booking

_Shape = Callable[[Slot], tuple[int, ...]]


class SketchBucket(UnitBucket):
    """Units of one dtype whose sketches are summed over the sites, with vectors uncompressed.

    Args:
        loads: the units that are sent at low rank.
        compressor: makes the sketches; its codecs must only round.
        dtype: of the sketches' computation.
        extras: parameters whose `grad` is sent uncompressed, in the first round.
    """

    adds_up = looks_ahead = True

    def __init__(
        self,
        loads: Sequence[Load],
        compressor: Compressor,
        dtype: torch.dtype,
        extras: Mapping[str, nn.Parameter],
    ) -> None:
        super().__init__(loads, extras)
        assert compressor.sketches is not None
        self.compressor, self.sketches = compressor, compressor.sketches
        self.dtype, self.wire = dtype, sum_dtype(compressor.wire, dtype)
        self.flagged = [name for load in loads if load.tapped for name in load.unit.params]

    @property
    def is_expected(self) -> bool:
        """True if there is one round."""
        return self.sketches.rounds == 1

    def lengths(self, context: StepContext) -> object:
        """Returns the number of summed elements of each dtype; empty with two rounds."""
        return self._lengths(context, self.sketches.shape)

    def lengths_ahead(self, context: StepContext) -> object:
        """Returns `lengths` with the sketches of the next step."""
        return self._lengths(context, self.sketches.shape_ahead)

    def expect(self, context: StepContext, turn: int) -> None:
        """Posts the receives of sums, on a transport where sites add up themselves."""
        self._expect(context, turn, self.sketches.shape)

    def expect_ahead(self, context: StepContext, turn: int) -> None:
        """Posts the receives with the sketches of the next step."""
        self._expect(context, turn, self.sketches.shape_ahead)

    def _expect(self, context: StepContext, turn: int, shape: _Shape) -> None:
        for dtype, length in self._lengths(context, shape).items():
            context.comm.expect_sum(length, turn, dtype)

    def _lengths(self, context: StepContext, shape: _Shape) -> dict[torch.dtype, int]:
        """Elements of the sums by dtype, in order; empty for two rounds, which post no receives."""
        lengths = defaultdict[torch.dtype, int](int)
        if self.sketches.rounds == 1:
            for slot in self.used(context):
                lengths[self.wire] += math.prod(shape(slot))
            lengths[self.dtype] += sum(self.exact_sizes(context))
        return lengths

    def used(self, context: StepContext) -> list[Slot]:
        """Returns slots that have a gradient on some site."""
        return [slot for slot in self.tapped if slot.weight in context.used]

    def biases(self, context: StepContext) -> list[Slot]:
        """Returns the used slots whose bias gradients are sent along."""
        return [slot for slot in self.used(context) if self.tapped[slot] and slot.bias]

    def exact_sizes(self, context: StepContext) -> list[int]:
        """Returns the numbers of elements of biases, extras and flags."""
        biases = [slot.groups * slot.outputs for slot in self.biases(context)]
        extras = [p.numel() for p in self.extras.values()]
        return [*biases, *extras, len(self.flagged) + 2]

    def start(self, context: StepContext) -> Pending:
        """Computes this site's part of the first sketches and starts to sum them."""
        return _SketchPending(self, context)


class _SketchPending(Pending):
    """Sums of sketches under way, of one or two rounds each.

    `advance` processes the first sums even if no second ones follow.
    """

    def __init__(self, bucket: SketchBucket, context: StepContext) -> None:
        self._advanced = 0
        self._bucket, self._context = bucket, context
        self._slots, self._biases = bucket.used(context), bucket.biases(context)
        self._sizes = bucket.exact_sizes(context)
        self._b_GO: dict[Slot, Tensor] = {}
        self._measured: dict[Slot, tuple[Gradient, Gradient | None]] = {}
        self._state, self._flags, self._lacks = State.GOOD, torch.empty(0), False
        self._digest = torch.zeros((), dtype=torch.int64, device=context.comm.device)
        self._additions: dict[str, Tensor] = {}
        self._means: dict[str, Tensor] = {}
        self._own = self._begun()
        exact = self._exact()
        if context.comm.tap is not None:
            self._tell_first(context.comm.tap, exact)
        self._first = _Sums(context.comm, [*self._own, exact])
        # Second sums of another size may have one round where the first have two, or two where
        # these have one: then `advance` does nothing, or `wait` starts what is left.
        self.rounds = 2 + (self._first.rounds - 1) * bucket.sketches.rounds
        self._second: _Sums | None = None
        self._last: Sequence[Tensor] = ()

    # -- the first round ------------------------------------------------------------------------

    def _begun(self) -> list[Tensor]:
        return [self._timed(slot, self._begin) for slot in self._slots]

    def _begin(self, slot: Slot) -> Tensor:
        if self._context.state != State.GOOD:
            return self._nothing(slot)
        gradient = self._context.gradient_of(slot, tapped=self._bucket.tapped[slot])
        if self._context.state != State.GOOD:
            return self._nothing(slot)
        if slot in self._biases:
            assert isinstance(gradient, Factors)
            self._b_GO[slot] = row_sum(gradient.d_GRO)
        if self._context.reading is not None:
            self._measured[slot] = gradient, self._bucket.compressor.residual(slot)
        part = self._bucket.sketches.begin(slot, gradient)
        if self._bucket.sketches.rounds == 1:
            self._measure(slot, part)
        return part

    def _nothing(self, slot: Slot) -> Tensor:
        shape = self._bucket.sketches.shape(slot)
        return torch.zeros(shape, dtype=self._bucket.wire, device=self._context.comm.device)

    def _exact(self) -> Tensor:
        """Vectors, then flags per tapped parameter and per state, which count sites when summed."""
        context, bucket = self._context, self._bucket
        exact = torch.zeros(sum(self._sizes), dtype=bucket.dtype, device=context.comm.device)
        biases, extras, flags = self._split(exact)
        for slot, b_GO in self._b_GO.items():
            biases[slot].copy_(b_GO.flatten() / context.comm.world_size)
        for name, view in extras.items():
            p = bucket.extras[name]
            context.fill(name, p, view.view(p.shape))
            traffic = context.comm.cost.all_reduce(view.nbytes)
            context.layers.book([Booking(name, "dense", *traffic)])
            context.check(name, [view])
        states = context.state.counts(lacks=bool(context.lacking(bucket.params)))
        flags.copy_(
            torch.tensor([*(name in context.has_autograd_grad for name in bucket.flagged), *states])
        )
        return exact

    def _split(self, exact: Tensor) -> tuple[dict[Slot, Tensor], dict[str, Tensor], Tensor]:
        *parts, flags = exact.split(self._sizes)
        biases = dict(zip(self._biases, parts, strict=False))  # extras follow
        extras = dict(zip(self._bucket.extras, parts[len(biases) :], strict=True))
        return biases, extras, flags

    def _take_exact(self, exact: Tensor) -> None:
        biases, extras, flags = self._split(exact)
        for slot, part in biases.items():
            assert slot.bias is not None
            p = self._context.params[slot.bias]
            add_rows(self._additions, slot.bias, slot.bias_rows, part.to(p.dtype), p)
        for name, part in extras.items():
            p = self._bucket.extras[name]
            self._means[name] = part.view(p.shape).to(p.dtype)
        self._flags = flags[:-2]
        surprised, void = flags[-2:].real.tolist()
        self._state, self._lacks = State.of(surprised, void), surprised > 0.0

    # -- further rounds -------------------------------------------------------------------------

    def advance(self) -> None:
        """Starts the next round: of the first sums, of the second sketches, or of their sums."""
        self._advanced += 1
        if self._advanced == self._first.rounds:
            self._turn()
        elif self._advanced == 1:
            self._first.advance()
        elif self._second is not None:
            self._second.advance()

    def _turn(self) -> None:
        """Computes and sends this site's part of the second sketches, from the first sums."""
        *sums, exact = self._first.wait()
        self._digest = sum(map(checksum, [*sums, exact]), self._digest)
        self._take_exact(exact)
        if self._state != State.GOOD:
            return  # all sites know the same state, so none starts a second round
        if self._bucket.sketches.rounds == 1:
            self._last = sums
            return
        turned = [
            self._timed(slot, lambda s, y=y: self._bucket.sketches.turn(s, y))
            for slot, y in zip(self._slots, sums, strict=True)
        ]
        self._own = turned
        self._second = _Sums(self._context.comm, turned)
        for slot, z in zip(self._slots, turned, strict=True):
            self._measure(slot, z)

    def wait(self) -> Result:
        """Computes the gradients from the sums of the last sketches."""
        if self._state != State.GOOD:
            return Result(state=self._state, digest=self._digest)
        context, bucket = self._context, self._bucket
        if self._second is not None:
            self._last = self._second.wait()
            self._digest = sum(map(checksum, self._last), self._digest)
        for slot, z, own in zip(self._slots, self._last, self._own, strict=True):
            mean = bucket.sketches.end(slot, z, context.comm.world_size)
            if context.comm.tap is not None:
                self._tell(context.comm.tap, slot, own, mean)
            if context.reading is not None:
                context.reading.record_mean(slot, [mean], 1.0)
            into = self._additions if bucket.tapped[slot] else self._means
            matrix = slot._replace(bias=None, bias_rows=None)
            add_gradients(into, matrix, [mean], context.params, 1.0)
        flags = zip(bucket.flagged, self._flags.tolist(), strict=True)
        has_autograd_grad = [name for name, flag in flags if flag]
        told = has_autograd_grad, self._digest, self._lacks
        return Result(self._means, self._additions, self._state, *told)

    def _tell(self, tap: Tap, slot: Slot, own: Tensor, mean: Arrived) -> None:
        """Tells a tap what this site's last sketch stands for."""
        content = self._bucket.sketches.stands_for(slot, own, mean)
        tap.sent(self._told(slot, own, content))

    def _tell_first(self, tap: Tap, exact: Tensor) -> None:
        """Tells a tap what is sent in the first round: sketches, and vectors beside them."""
        if self._bucket.sketches.rounds == 2 and self._context.state == State.GOOD:
            for slot, own in zip(self._slots, self._own, strict=True):
                content = self._bucket.sketches.first_stands_for(slot, own)
                tap.sent(replace(self._told(slot, own, content), kind=Kind.SKETCH))
        biases, extras, _ = self._split(exact)
        scale = self._context.comm.world_size
        about = {"way": Way.SUMMED, "step": self._context.header.step, "scale": scale}
        for slot, part in biases.items():
            assert slot.bias is not None
            matrix, own = bias_slot(slot), part.view(1, -1, 1)
            tap.sent(Sent(name=slot.bias, content=own, slot=matrix, **about))
        for name, part in extras.items():
            own = part.view(self._bucket.extras[name].shape)
            tap.sent(Sent(name=name, content=own, **about))

    def _told(self, slot: Slot, own: Tensor, content: Arrived | None) -> Sent:
        about = {"name": slot.weight, "way": Way.SUMMED, "step": self._context.header.step}
        if content is None:
            return Sent(content=[own], **about)
        matrix = slot._replace(bias=None, bias_rows=None)  # its bias goes beside the sketches
        return Sent(content=content, slot=matrix, **about)

    # -- both -----------------------------------------------------------------------------------

    def _measure(self, slot: Slot, last: Tensor) -> None:
        if slot in self._measured and self._context.reading is not None:
            projection = self._bucket.sketches.projection(slot, last)
            self._context.reading.sketched(slot, *self._measured.pop(slot), projection)
            if self._bucket.tapped[slot]:
                self._context.reading.samples(slot, self._context.scale)

    def _timed(self, slot: Slot, work: Callable[[Slot], Tensor]) -> Tensor:
        began = time.perf_counter()
        part = work(slot).to(self._bucket.wire)
        seconds = time.perf_counter() - began
        traffic = self._context.comm.cost.all_reduce(part.nbytes)
        columns = self._bucket.sketches.columns(slot)
        booking = Booking(slot.weight, self._bucket.compressor.why.value, *traffic, rows=columns)
        self._context.layers.book([booking], compress_s=seconds)
        return part


class _Sums:
    """Sums over the sites of several tensors: one all-reduce per dtype.

    Attributes:
        rounds: of the longest.
    """

    def __init__(self, comm: Comm, parts: Sequence[Tensor]) -> None:
        self._parts = parts
        self._works: dict[torch.dtype, Work] = {}
        self._in_pieces: list[TwoRounds] = []
        for dtype in dict.fromkeys(part.dtype for part in parts):
            flat = torch.cat([part.flatten() for part in parts if part.dtype == dtype])
            self._works[dtype] = work = comm.all_reduce(flat)
            if comm.sum_rounds(flat.nbytes) == 2:
                self._in_pieces.append(cast("TwoRounds", work))
        self.rounds = 2 if self._in_pieces else 1

    def advance(self) -> None:
        """Starts the second rounds of the all-reduces that have one."""
        for work in self._in_pieces:
            work.advance()

    def wait(self) -> list[Tensor]:
        """Returns the sums, in the shapes of the parts."""
        sums: dict[int, Tensor] = {}
        for dtype, work in self._works.items():
            members = [i for i, part in enumerate(self._parts) if part.dtype == dtype]
            flat = work.wait().split([self._parts[i].numel() for i in members])
            sums.update(
                {i: t.view(self._parts[i].shape) for i, t in zip(members, flat, strict=True)}
            )
        return [sums[i] for i in range(len(self._parts))]
