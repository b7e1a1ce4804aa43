"""The protocol of buckets, and what their messages in a step have in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Protocol, SupportsInt

import torch
from torch import Tensor, nn

from outergrad.core.protocols import FactorsOf
from outergrad.core.transport import Comm, Work
from outergrad.core.types import Gradient, Slot, Source, Unit, tensors_of
from outergrad.linalg.finite import is_finite
from outergrad.linalg.gradients import as_tensor, scaled
from outergrad.messages.header import Header
from outergrad.messages.wire import State
from outergrad.record.gauge import Reading
from outergrad.record.stats import LayerBook
from outergrad.replay.block_message import Blocks


class Bucket(Protocol):
    """Parameters whose gradients share a message; the same on every site."""

    params: frozenset[str]
    """All parameters of the bucket: its message starts when they are ready."""
    dense_params: Sequence[str]
    """Parameters whose `param.grad` is sent, unchanged or compressed."""
    adds_up: bool = False
    """True if its messages are all-reduces. A step's all-reduces match posted receives in order."""

    looks_ahead: bool = False
    """True if its messages in the next step may have other lengths: `lengths_ahead`."""

    @property
    def is_expected(self) -> bool:
        """True if `expect` posts the receives of all its messages."""
        return True

    @property
    def is_view(self) -> bool:
        """True if its results are views of a buffer, which may become the gradients."""
        return False

    @property
    def is_kept(self) -> bool:
        """True if its result can be produced again, and not be refused once all messages are there.

        Equal on every site. A step of such buckets need not wait for votes (optimistic commit).
        """
        return False

    def lengths(self, context: StepContext) -> object:
        """Returns a value that determines the lengths of its messages, the same on all sites.

        None where no receives are posted for them.
        """

    def lengths_ahead(self, context: StepContext) -> object:
        """Returns `lengths` of a next step like this one, if this one counts; if it looks ahead."""

    def expect(self, context: StepContext, turn: int) -> None:
        """Posts the receives of its messages in a turn; called on all buckets in order.

        Does nothing for all-reduces that no receives are posted for.
        """

    def expect_ahead(self, context: StepContext, turn: int) -> None:
        """Posts the receives of the next turn, with `lengths_ahead`; if it looks ahead."""

    def start(self, context: StepContext) -> Pending:
        """Starts to send this site's part."""
        ...


@dataclass(frozen=True)
class Load:
    """A unit's content in a message.

    Attributes:
        unit: the unit.
        tapped: whether every site has its factors; otherwise `param.grad` is sent.
    """

    unit: Unit
    tapped: bool

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Slots whose gradients are compressed."""
        return self.unit.slots if self.tapped else self.unit.matrices

    @property
    def vectors(self) -> tuple[str, ...]:
        """Parameters whose gradients are sent uncompressed."""
        return () if self.tapped else self.unit.vectors


class UnitBucket(Bucket):
    """A bucket of units; its content is the same on every site.

    Attributes:
        names: the parameters of its units.
        tapped: per slot, whether every site has its factors.
        slots: slots whose gradients are compressed.
        extras: further parameters, whose `grad` is sent uncompressed.
        params: names and extras.
        dense_params: parameters whose `param.grad` is sent, unchanged or compressed.
    """

    def __init__(self, loads: Sequence[Load], extras: Mapping[str, nn.Parameter]) -> None:
        self.names = tuple(name for load in loads for name in load.unit.params)
        self.tapped = {slot: load.tapped for load in loads for slot in load.slots}
        self.slots = tuple(self.tapped)
        self.extras = dict(extras)
        self.params = frozenset([*self.names, *extras])
        formed = [name for load in loads if not load.tapped for name in load.unit.params]
        self.dense_params: Sequence[str] = tuple(dict.fromkeys([*formed, *extras]))


@dataclass
class Result:
    """Result of a bucket's messages.

    Attributes:
        means: mean gradients that replace `param.grad`, from which they were computed.
        additions: mean gradients from factors, to be added to `param.grad`.
        digest: of the sums and messages, which are equal on every site.
        lacks: whether some site has no gradient for a parameter that its header announced.
        state: the worst state that a site sent; unless GOOD, the other fields are meaningless.
        has_autograd_grad: parameters that on some site also have a gradient outside their factors.
    """

    means: Mapping[str, Tensor] = field(default_factory=dict)
    additions: Mapping[str, Tensor] = field(default_factory=dict)
    state: State = State.GOOD
    has_autograd_grad: list[str] = field(default_factory=list)
    digest: SupportsInt | None = None
    lacks: bool = False


class Gathered:
    """Messages of all sites, kept so that they can be read more than once.

    Args:
        work: the collective that receives them.
        own: this site's message.
    """

    def __init__(self, work: Work, own: Tensor) -> None:
        self._work, self.own = work, own
        self._messages: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        """Returns the messages in the order of sites; blocks the first time."""
        if self._messages is None:
            self._messages = list(self._work.wait())
        return self._messages

    def replace(self, site: int, message: Tensor) -> None:
        """Replaces a damaged message by its resent copy, which must have the right length."""
        self.wait()[site] = message


class Pending(Protocol):
    """A bucket whose messages are under way.

    Attributes:
        rounds: times that something is waited for; `advance` is called between them.
    """

    rounds: int = 1

    gathered: Gathered | None = None
    """Messages of all sites to all, which can be sent again; None for sums."""

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """Views of a buffer that will hold the sums, by parameter; of a bucket that `is_view`."""
        return {}

    @property
    def is_as_received(self) -> bool:
        """False if the training loop has changed a result that became its gradient."""
        return True

    def advance(self) -> None:
        """Starts the next round as soon as the one before has come."""

    def wait(self) -> Result:
        """Blocks until the result is there; after all rounds. Repeatable if the bucket is kept."""
        ...


@dataclass
class StepContext:
    """State of this site and step that buckets need in order to send.

    Attributes:
        comm: the transport.
        params: trainable parameters by name.
        header: this site's.
        index: index in the headers of each slot and block.
        factors_of: returns a slot's raw rows on this site, all uses stacked, as many as announced.
        has_autograd_grad: parameters for which autograd has a gradient here, besides factors.
        blocks: blocks that all sites replay.
        state: this site's; unless GOOD it takes part in all messages and sends no gradients.
        layers: bytes and seconds by layer, filled by the buckets.
        waits: per message, its parameters and the seconds that this site waited for it.
        reading: measures the gradients, if the step is recorded.
        headers: of all sites, in the order of ranks; of an earlier step if this one follows a plan.
        used: parameters that have a gradient on some site; the others are left alone, as in DDP.
        skips_bad: whether a step is skipped if a gradient is not finite.
        bad: name of a parameter whose gradient on this site is not finite.
        share: weight of this site in the mean gradient, 1 / S if all sites have the same.
        scale: S times `share`; factors are multiplied by it when sent, and divided by S on arrival.
        owed: returns the unsent residuals of a parameter that travels dense, see `Planner.owed`.
        owes: returns whether there are any such residuals.
        empty: slots and blocks that this backward captured nothing for, noted as they are sent.
        without_grad: parameters whose `param.grad` was None, noted as they are sent.
    """

    comm: Comm
    params: Mapping[str, nn.Parameter]
    header: Header
    index: Mapping[Source, int]
    factors_of: FactorsOf
    has_autograd_grad: set[str]
    blocks: Blocks
    state: State = State.GOOD
    layers: LayerBook = field(default_factory=LayerBook)
    waits: list[tuple[Collection[str], float]] = field(default_factory=list)
    reading: Reading | None = None
    headers: Sequence[Header] = ()
    used: frozenset[str] = frozenset()
    skips_bad: bool = False
    bad: str | None = None
    share: float = 1.0
    scale: float = 1.0
    owed: Callable[[str], Sequence[tuple[Slot, Gradient]]] = lambda name: ()
    owes: Callable[[], bool] = lambda: False
    empty: set[Source] = field(default_factory=set)
    without_grad: set[str] = field(default_factory=set)

    def take(self, headers: Sequence[Header]) -> None:
        """Stores all sites' headers and derives the used parameters and this site's weight."""
        self.headers = headers
        self.used = frozenset().union(*(compress(self.params, header.used) for header in headers))
        whole = sum(header.weight for header in headers)
        weight, sites = headers[self.comm.rank].weight, len(headers)
        self.share, self.scale = (weight / whole, sites * weight / whole) if whole else (0.0, 0.0)

    def gradient_of(self, slot: Slot, *, tapped: bool) -> Gradient:
        """Returns this site's scaled gradient; marks the step as bad if it is not finite.

        It is the factors, without rows where the slot was not used, or the formed gradient.
        """
        announced = self.header.uses[self.index[slot]].rows if tapped else 0
        own = self.factors_of(slot, announced) if tapped else self._formed(slot)
        gradient = scaled(own, self.scale)
        if self.skips_bad:
            self.check(slot.weight, tensors_of(gradient))
        return gradient

    def fill(self, name: str, p: nn.Parameter, out: Tensor) -> None:
        """Writes this site's part of a mean that is summed over the sites; zeros if void."""
        good = self.state == State.GOOD
        if p.grad is None:
            self.without_grad.add(name)
        copy_scaled(name, p, out, self.share if good else 0.0)
        for slot, residual in self.owed(name) if good else ():
            start, stop = slot.weight_rows or (0, p.shape[0])
            part = out.view(p.shape)[start:stop]
            part.add_(as_tensor(residual).reshape(part.shape), alpha=1 / self.comm.world_size)

    def fill_all(self, views: Mapping[str, Tensor]) -> None:
        """Fills the views of several parameters, and checks them, as `fill` and `check` do."""
        alike, params = not self.skips_bad and self.adds_all_alike(), self.params
        for name, view in views.items():
            grad = params[name].grad
            if alike and grad is not None and not grad.is_sparse:  # the usual case, in one call
                torch.mul(grad, self.share, out=view)
            else:
                self.fill(name, params[name], view)
                self.check(name, [view])

    def _formed(self, slot: Slot) -> Tensor:
        if self.params[slot.weight].grad is None:
            self.without_grad.add(slot.weight)
        return formed(slot, self.params)

    def lacking(self, names: Collection[str] | None = None) -> set[str]:
        """Returns parameters announced in this site's header that its backward has no gradient for.

        Known once their message is packed; free of cost in a step in which all have gradients.

        Args:
            names: to restrict the result to; None for all.
        """
        if not (self.empty or self.without_grad):
            return set()
        for source in self.empty:  # while `param.grad` is as backward left it
            self.without_grad.update(filter(self._is_empty, source.params))
        found = self.without_grad.intersection(compress(self.params, self.header.used))
        return found if names is None else found.intersection(names)

    def _is_empty(self, name: str) -> bool:
        if self.params[name].grad is not None:
            return False
        uses = ((source, self.header.uses[k]) for source, k in self.index.items())
        captured = (s for s, use in uses if use.tapped and use.rows and name in s.params)
        return all(source in self.empty for source in captured)

    def adds_all_alike(self) -> bool:
        """True if `fill` would only multiply by the share, for every parameter."""
        return self.state == State.GOOD and self.share != 0.0 and not self.owes()

    def check(self, name: str, parts: Sequence[Tensor]) -> None:
        """Marks the step as bad if a part of this site's gradient of a parameter is not finite."""
        if self.skips_bad and self.state == State.GOOD and not all(map(is_finite, parts)):
            self.bad, self.state = name, State.BAD

    def waited_s(self) -> dict[str, float]:
        """Returns, by parameter, the seconds that this site waited for its messages."""
        waited: defaultdict[str, float] = defaultdict(float)
        for names, seconds in self.waits:
            for name in names:
                waited[name] += seconds
        return waited

    def forget(self) -> None:
        """Resets the records of a step that starts again."""
        self.layers.forget()
        self.waits.clear()
        self.without_grad.clear()
        if self.reading is not None:
            self.reading.forget()


def copy_scaled(name: str, p: nn.Parameter, out: Tensor, scale: float) -> None:
    """Computes `out = scale * p.grad`; a missing gradient counts as zero, scale 0 gives zeros."""
    if p.grad is None or scale == 0.0:
        out.zero_()
    else:
        torch.mul(_dense(name, p.grad), scale, out=out)


def formed(slot: Slot, params: Mapping[str, nn.Parameter]) -> Tensor:
    """Returns the slot's part of `param.grad`, (G, O, I); a missing gradient counts as zero."""
    p, shape = params[slot.weight], (slot.groups, slot.outputs, slot.inputs)
    if p.grad is None:
        return p.new_zeros(shape, requires_grad=False)
    start, stop = slot.weight_rows or (0, p.shape[0])
    return _dense(slot.weight, p.grad)[start:stop].reshape(shape)


def _dense(name: str, gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        raise RuntimeError(f"{name!r} has a sparse gradient: build its layer with sparse=False")
    return gradient
