"""Sketches of gradients in all-reduces: two rounds, bytes that do not grow with the sites."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from outergrad._bucket import Load, Pending, Result, Sender, copy_scaled
from outergrad._protocols import Comm, Work
from outergrad._protocols import Sketches as Sketched
from outergrad._types import Factors, Slot
from outergrad.comm.torch import ring_bytes
from outergrad.comm.wire import State
from outergrad.linalg.gradients import add_gradients, add_rows
from outergrad.linalg.outer import row_sum


class SketchBucket:
    """Units of one dtype whose sketches are summed over the sites, with vectors as they are.

    Args:
        loads: what travels at low rank.
        sketches: makes the sketches.
        dtype: what they are computed in.
        wire: what they are rounded to; None for no rounding.
        riders: parameters whose `grad` travels as it is, in the first round.
    """

    def __init__(
        self,
        loads: Sequence[Load],
        sketches: Sketched,
        dtype: torch.dtype,
        wire: torch.dtype | None,
        riders: Mapping[str, nn.Parameter],
    ) -> None:
        names = [name for load in loads for name in load.unit.params]
        formed = [name for load in loads if not load.tapped for name in load.unit.params]
        self.params = frozenset([*names, *riders])
        self.dense_params: Sequence[str] = tuple(dict.fromkeys([*formed, *riders]))
        self.sketches, self.dtype, self.wire = sketches, dtype, wire or dtype
        self.riders = dict(riders)
        self.tapped = {slot: load.tapped for load in loads for slot in load.slots}
        self.flagged = [name for load in loads if load.tapped for name in load.unit.params]

    def start(self, sender: Sender) -> Pending:
        """Computes this site's part of the first sketches and starts to sum them."""
        return _SketchPending(self, sender)


class _SketchPending:
    def __init__(self, bucket: SketchBucket, sender: Sender) -> None:
        self._bucket, self._sender = bucket, sender
        used = sender.used()
        self._slots = [slot for slot in bucket.tapped if slot.weight in used]
        self._biases = [slot for slot in self._slots if bucket.tapped[slot] and slot.bias]
        self._state, self._flags = State.GOOD, torch.empty(0)
        self._additions: dict[str, Tensor] = {}
        self._means: dict[str, Tensor] = {}
        self._first = _Sums(sender.comm, [*self._begun(), self._exact()])
        self._second: _Sums | None = None

    # -- the first round ------------------------------------------------------------------------

    def _begun(self) -> list[Tensor]:
        sketches = self._bucket.sketches
        good, parts = self._sender.state == State.GOOD, []
        self._b_GO: dict[Slot, Tensor] = {}
        for slot in self._slots:
            shape = (slot.groups, slot.outputs, sketches.columns(slot))
            parts.append(self._timed(slot, self._begin) if good else self._zeros(slot, shape))
        return parts

    def _begin(self, slot: Slot) -> Tensor:
        gradient = self._sender.gradient_of(slot, tapped=self._bucket.tapped[slot])
        if slot in self._biases:
            assert isinstance(gradient, Factors)
            self._b_GO[slot] = row_sum(gradient.d_GRO)
        return self._bucket.sketches.begin(slot, gradient)

    def _exact(self) -> Tensor:
        """Vectors, then one number per tapped parameter and per state: how many sites say so."""
        sender, bucket = self._sender, self._bucket
        scale = 1.0 / sender.comm.world_size if sender.state == State.GOOD else 0.0
        sizes = [*self._bias_sizes(), *(p.numel() for p in bucket.riders.values())]
        flags = [float(name in sender.mixed) for name in bucket.flagged]
        flags += [float(sender.state == State.SURPRISED), float(sender.state == State.FAILED)]
        exact = torch.zeros(sum(sizes) + len(flags), dtype=bucket.dtype, device=sender.comm.device)
        exact[-len(flags) :] = torch.tensor(flags)
        parts = exact.split([*sizes, len(flags)])
        for slot, part in zip(self._biases, parts, strict=False):
            if slot in self._b_GO:
                part.copy_(self._b_GO[slot].flatten() * scale)
        for (name, p), part in zip(bucket.riders.items(), parts[len(self._biases) :], strict=False):
            copy_scaled(name, p, part.view(p.shape), scale)
            sender.add(name, "dense", ring_bytes(part.nbytes, sender.comm.world_size))
        return exact

    def _bias_sizes(self) -> list[int]:
        return [slot.groups * slot.outputs for slot in self._biases]

    def _take_exact(self, exact: Tensor) -> None:
        riders = self._bucket.riders
        sizes = [*self._bias_sizes(), *(p.numel() for p in riders.values())]
        *parts, flags = exact.split([*sizes, len(exact) - sum(sizes)])
        params = self._sender.params
        for slot, part in zip(self._biases, parts, strict=False):
            assert slot.bias is not None
            p = params[slot.bias]
            add_rows(self._additions, slot.bias, slot.bias_rows, part.to(p.dtype), p)
        for (name, p), part in zip(riders.items(), parts[len(self._biases) :], strict=True):
            self._means[name] = part.view(p.shape).to(p.dtype)
        surprised, failed = flags[-2:].tolist()
        self._flags = flags[:-2]
        self._state = State.FAILED if failed else State.SURPRISED if surprised else State.GOOD

    # -- the second round -----------------------------------------------------------------------

    def advance(self) -> None:
        """From the sums of the first sketches to this site's part of the second."""
        *sums, exact = self._first.wait()
        self._take_exact(exact)
        if self._state != State.GOOD:
            return  # on all sites alike
        turned = [
            self._timed(slot, lambda s, y=y: self._bucket.sketches.turn(s, y))
            for slot, y in zip(self._slots, sums, strict=True)
        ]
        self._second = _Sums(self._sender.comm, turned)

    def wait(self) -> Result:
        """From the sums of the second sketches to the gradients."""
        if self._state != State.GOOD:
            return Result(state=self._state)
        assert self._second is not None
        sender, bucket = self._sender, self._bucket
        for slot, z_GIK in zip(self._slots, self._second.wait(), strict=True):
            factors = bucket.sketches.end(slot, z_GIK, sender.comm.world_size)
            into = self._additions if bucket.tapped[slot] else self._means
            matrix = replace(slot, bias=None, bias_rows=None)
            add_gradients(into, matrix, [factors], sender.params, 1.0)
        flags = zip(bucket.flagged, self._flags.tolist(), strict=True)
        mixed = [name for name, flag in flags if flag]
        return Result(self._means, self._additions, self._state, mixed)

    # -- both -----------------------------------------------------------------------------------

    def _zeros(self, slot: Slot, shape: tuple[int, ...]) -> Tensor:
        """The part of a site that has nothing to say."""
        return torch.zeros(shape, dtype=self._bucket.wire, device=self._sender.comm.device)

    def _timed(self, slot: Slot, work: Callable[[Slot], Tensor]) -> Tensor:
        began = time.perf_counter()
        part = work(slot).to(self._bucket.wire)
        sent = ring_bytes(part.nbytes, self._sender.comm.world_size)
        name = slot.layer or slot.weight
        self._sender.add(name, "low rank", sent, time.perf_counter() - began)
        return part


class _Sums:
    """Sums over the sites of several tensors: one all-reduce per dtype."""

    def __init__(self, comm: Comm, parts: Sequence[Tensor]) -> None:
        self._parts = parts
        self._works: dict[torch.dtype, Work] = {}
        for dtype in dict.fromkeys(part.dtype for part in parts):
            flat = torch.cat([part.flatten() for part in parts if part.dtype == dtype])
            self._works[dtype] = comm.all_reduce(flat)

    def wait(self) -> list[Tensor]:
        """The sums, in the shapes of the parts."""
        sums: dict[int, Tensor] = {}
        for dtype, work in self._works.items():
            members = [i for i, part in enumerate(self._parts) if part.dtype == dtype]
            flat = work.wait().split([self._parts[i].numel() for i in members])
            sums.update(
                {i: t.view(self._parts[i].shape) for i, t in zip(members, flat, strict=True)}
            )
        return [sums[i] for i in range(len(self._parts))]
