"""Messages of a step: gradients side by side in an all-reduce, or factors in an all-gather."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from outergrad._types import Comm, Exchange, Factors, FactorsOf, Slot, Unit, Work
from outergrad.comm.wire import Header, Piece, Preamble, State
from outergrad.linalg.gradients import add_gradients
from outergrad.record.stats import LayerStats


@dataclass
class Result:
    """What a message brought.

    Attributes:
        gradients: mean gradients over the sites by parameter, to replace (dense) or to be added
            to (factors) what is in `param.grad`.
        state: the worst state that a site sent; if not GOOD, there are no gradients.
        mixed: parameters that on some site also have a gradient outside their factors.
    """

    gradients: dict[str, Tensor]
    state: State = State.GOOD
    mixed: list[str] = field(default_factory=list)


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> Result:
        """Blocks until it is there."""
        ...


@dataclass
class Sender:
    """What a bucket needs to know of this site and step to send.

    Attributes:
        comm: the transport.
        params: trainable parameters by name.
        header: this site's.
        headers: every site's, in the order of ranks.
        slot_index: place of each slot in the headers.
        factors_of: this site's raw rows of a slot, all its uses stacked.
        mixed: names of parameters for which autograd has a gradient of its own on this site.
        state: this site's; unless GOOD it takes part in everything and sends nothing.
        layers: bytes and seconds by layer, filled by the buckets.
    """

    comm: Comm
    params: Mapping[str, nn.Parameter]
    header: Header
    headers: Sequence[Header]
    slot_index: Mapping[Slot, int]
    factors_of: FactorsOf
    mixed: set[str]
    state: State = State.GOOD
    layers: dict[str, LayerStats] = field(default_factory=dict)

    def add(self, layer: str, travels: str, nbytes: int, seconds: float = 0.0) -> None:
        """Books bytes and seconds on a layer."""
        before = self.layers.get(layer, LayerStats(travels, 0, 0.0))
        self.layers[layer] = LayerStats(
            travels, before.sent_bytes + nbytes, before.compress_s + seconds
        )


class DenseBucket:
    """Parameters of one dtype whose gradients travel in one all-reduce.

    The buffer is kept between steps. Its last two elements count the sites that are surprised and
    those that failed.
    """

    dense = True

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self.params = frozenset(params)
        self._params = dict(params)
        self._buffer: Tensor | None = None

    def start(self, sender: Sender) -> Pending:
        """Copies what is in `param.grad` (nothing counts as zero) and starts the all-reduce."""
        buffer, sites = self._scratch(), sender.comm.world_size
        views = self._views(buffer)
        buffer[-2] = float(sender.state == State.SURPRISED)
        buffer[-1] = float(sender.state == State.FAILED)
        for (name, p), view in zip(self._params.items(), views, strict=True):
            _copy_scaled(name, p, view, 1.0 / sites if sender.state == State.GOOD else 0.0)
            sender.add(name, "dense", 2 * (sites - 1) * view.nbytes // sites)
        work = sender.comm.all_reduce(buffer)
        return _DensePending(work, dict(zip(self._params, views, strict=True)))

    def _scratch(self) -> Tensor:
        if self._buffer is None:
            numel = sum(p.numel() for p in self._params.values())
            first = next(iter(self._params.values()))
            self._buffer = first.new_empty(numel + 2, requires_grad=False)
        return self._buffer

    def _views(self, buffer: Tensor) -> list[Tensor]:
        parts = buffer[:-2].split([p.numel() for p in self._params.values()])
        return [part.view(p.shape) for part, p in zip(parts, self._params.values(), strict=True)]


class _DensePending:
    def __init__(self, work: Work, views: dict[str, Tensor]) -> None:
        self._work, self._views = work, views

    def wait(self) -> Result:
        surprised, failed = self._work.wait()[-2:].tolist()
        state = State.FAILED if failed else State.SURPRISED if surprised else State.GOOD
        return Result(self._views, state)


def _copy_scaled(name: str, p: nn.Parameter, view: Tensor, scale: float) -> None:
    if p.grad is None or scale == 0.0:
        view.zero_()
    elif p.grad.is_sparse:
        raise RuntimeError(f"{name!r} has a sparse gradient: build its layer with sparse=False")
    else:
        torch.mul(p.grad, scale, out=view)


class FactorBucket:
    """Units whose factors travel in one all-gather, straight from each site to all others."""

    dense = False

    def __init__(self, index: int, units: Sequence[Unit], exchange: Exchange) -> None:
        self._names = tuple(name for unit in units for name in unit.params)
        self.params = frozenset(self._names)
        self._index, self._exchange = index, exchange
        self._slots = tuple(slot for unit in units for slot in unit.slots)

    def start(self, sender: Sender) -> Pending:
        """Computes and packs this site's factors and starts the all-gather."""
        comm, header = sender.comm, sender.header
        layouts = [self._layout(sender, site) for site in sender.headers]
        preamble = self._preamble(sender)
        message = torch.zeros(
            self._nbytes(layouts[comm.rank]), dtype=torch.uint8, device=comm.device
        )
        preamble.write(message)
        if sender.state == State.GOOD:
            self._pack(sender, layouts[header.rank], message)
        work = comm.all_gather(message, [self._nbytes(layout) for layout in layouts])
        return _FactorPending(work, self, layouts, preamble, sender.params)

    def _preamble(self, sender: Sender) -> Preamble:
        header = sender.header
        flags = tuple(name in sender.mixed for name in self._names)
        return Preamble(
            header.fingerprint, header.step, self._index, header.rank, sender.state, flags
        )

    def _layout(self, sender: Sender, site: Header) -> list[Piece]:
        """The pieces of one site's message, from the agreed rows and dtypes."""
        pieces = []
        for slot in self._slots:
            k = sender.slot_index[slot]
            used = [h.uses[k].dtype for h in sender.headers if h.uses[k].rows]
            dtype = used[0] if len(set(used)) == 1 else torch.float32
            rows = self._exchange.sent_rows(slot, site.uses[k].rows)
            pieces.append(Piece(slot, rows, dtype, self._exchange.sends_bias(slot)))
        return pieces

    def _nbytes(self, layout: Iterable[Piece]) -> int:
        return Preamble.nbytes(len(self._names)) + sum(piece.nbytes for piece in layout)

    def split(self, layout: Sequence[Piece], message: Tensor) -> list[Factors | None]:
        """Views of the pieces of a message."""
        start = Preamble.nbytes(len(self._names))
        parts = message[start:].split([piece.nbytes for piece in layout])
        pairs = zip(layout, parts, strict=True)
        return [piece.views(part) if piece.rows else None for piece, part in pairs]

    def _pack(self, sender: Sender, layout: Sequence[Piece], message: Tensor) -> None:
        for piece, views in zip(layout, self.split(layout, message), strict=True):
            slot, began = piece.slot, time.perf_counter()
            if views is not None:
                raw = sender.factors_of(slot)
                factors = self._exchange.compress(slot, raw, piece.rows)
                _fill(views, factors)
            sent = piece.nbytes * (sender.comm.world_size - 1)
            sender.add(slot.layer or slot.weight, "factors", sent, time.perf_counter() - began)

    def mixed(self, preambles: Sequence[Preamble]) -> list[str]:
        """Parameters that some site flagged."""
        flags = zip(*(preamble.flags for preamble in preambles), strict=True)
        return [name for name, flag in zip(self._names, flags, strict=True) if any(flag)]

    def gradients(
        self, parts_SK: Sequence[Sequence[Factors | None]], params: Mapping[str, nn.Parameter]
    ) -> dict[str, Tensor]:
        """Mean gradients over the sites from every site's (S) factors of every slot (K)."""
        gradients: dict[str, Tensor] = {}
        scale = 1.0 / len(parts_SK)
        for k, slot in enumerate(self._slots):
            parts = [part for part in (parts_K[k] for parts_K in parts_SK) if part is not None]
            if parts:
                add_gradients(gradients, slot, parts, params, scale)
        return gradients


class _FactorPending:
    def __init__(
        self,
        work: Work,
        bucket: FactorBucket,
        layouts: Sequence[Sequence[Piece]],
        expected: Preamble,
        params: Mapping[str, nn.Parameter],
    ) -> None:
        self._work, self._bucket, self._layouts = work, bucket, layouts
        self._expected, self._params = expected, params

    def wait(self) -> Result:
        messages = self._work.wait()
        preambles = [Preamble.read(m, self._expected, rank) for rank, m in enumerate(messages)]
        state = max(preamble.state for preamble in preambles)
        if state != State.GOOD:
            return Result({}, state)
        pairs = zip(self._layouts, messages, strict=True)
        parts_SK = [self._bucket.split(layout, message) for layout, message in pairs]
        gradients = self._bucket.gradients(parts_SK, self._params)
        return Result(gradients, mixed=self._bucket.mixed(preambles))


def _fill(views: Factors, factors: Factors) -> None:
    """Copies factors into a message; fewer rows than agreed leave zeros."""
    rows = factors.d_GRO.shape[1]
    views.d_GRO[:, :rows].copy_(factors.d_GRO)
    (views.a_GRI[:rows] if views.a_GRI.dim() == 1 else views.a_GRI[:, :rows]).copy_(factors.a_GRI)
    if views.b_GO is not None and factors.b_GO is not None:
        views.b_GO.copy_(factors.b_GO)
