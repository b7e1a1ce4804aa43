"""What every message of a step has in common."""

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
    """Parameters that share a message; the same on every site."""

    params: frozenset[str]
    """All of them: when they are ready, the message is."""
    dense_params: Sequence[str]
    """Those of which what is in `param.grad` travels, as it is or compressed."""
    adds_up: bool = False
    """Whether its messages are sums: all sums of a step meet posted receives in one order."""

    @property
    def is_expected(self) -> bool:
        """Whether `expect` posts the receives of all its messages."""
        return True

    @property
    def is_kept(self) -> bool:
        """Whether what it brought can be had again later, and cannot be refused once it is there.

        The same on every site: then a step need not wait for votes.
        """
        return False

    def lengths(self, context: StepContext) -> object:
        """What the lengths of its messages follow from, the same on all sites.

        None where nobody expects them.
        """

    def lengths_ahead(self, context: StepContext) -> object:
        """What they will be in a next step like this one, if this one counts."""
        return self.lengths(context)

    def expect(self, context: StepContext, turn: int) -> None:
        """Posts the receives of its messages in a turn; called on all buckets, in their order.

        Does nothing where sums are received that nobody expects.
        """

    def expect_ahead(self, context: StepContext, turn: int) -> None:
        """The same of the next turn, with `lengths_ahead`."""
        self.expect(context, turn)

    def start(self, context: StepContext) -> Pending:
        """Sends this site's part."""
        ...


@dataclass(frozen=True)
class Load:
    """What a unit puts into a message.

    Attributes:
        unit: the unit.
        tapped: whether every site has its factors; otherwise what is in `param.grad` counts.
    """

    unit: Unit
    tapped: bool

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What is compressed."""
        return self.unit.slots if self.tapped else self.unit.matrices

    @property
    def vectors(self) -> tuple[str, ...]:
        """Parameters whose gradients travel as they are."""
        return () if self.tapped else self.unit.vectors


class Carried(Bucket):
    """What a bucket of units carries, the same on every site.

    Attributes:
        names: the parameters of its units.
        tapped: per slot, whether every site has its factors.
        slots: what is compressed.
        extras: parameters whose `grad` travels as it is, besides.
        params: names and extras.
        dense_params: those of which what is in `param.grad` travels, as it is or compressed.
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
    """What a message brought.

    Attributes:
        means: of what the sites had in `param.grad`, which they replace.
        additions: mean gradients from factors, to be added to what is in `param.grad`.
        digest: of sums and messages that are the same on every site.
        lacks: whether some site has nothing for a parameter that its header announced.
        state: the worst state that a site sent; if not GOOD, the rest means nothing.
        has_autograd_grad: parameters that on some site also have a gradient outside their factors.
    """

    means: Mapping[str, Tensor] = field(default_factory=dict)
    additions: Mapping[str, Tensor] = field(default_factory=dict)
    state: State = State.GOOD
    has_autograd_grad: list[str] = field(default_factory=list)
    digest: SupportsInt | None = None
    lacks: bool = False


class Gathered:
    """Messages of all sites; kept, so that they can be asked for more than once.

    Args:
        work: brings them.
        own: this site's.
    """

    def __init__(self, work: Work, own: Tensor) -> None:
        self._work, self.own = work, own
        self._messages: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        """Those of all sites, in their order; blocks the first time."""
        if self._messages is None:
            self._messages = list(self._work.wait())
        return self._messages

    def replace(self, site: int, message: Tensor) -> None:
        """One of them was damaged, and has come again; its length is what it must be."""
        self.wait()[site] = message


class Pending(Protocol):
    """A message under way.

    Attributes:
        rounds: 2 where `advance` starts another one.
    """

    rounds: int = 1

    gathered: Gathered | None = None
    """The messages of all sites to all, which can be sent again; None of sums."""

    def advance(self) -> None:
        """Starts its second round, if it has one, as soon as the first is there."""

    def wait(self) -> Result:
        """Blocks until it is there; after `advance`. Where the bucket is kept, more than once."""
        ...


@dataclass
class StepContext:
    """What a bucket needs to know of this site and step to send.

    Attributes:
        comm: the transport.
        params: trainable parameters by name.
        header: this site's.
        index: place in the headers of each slot and block.
        factors_of: this site's raw rows of a slot, all its uses stacked, as many as announced.
        has_autograd_grad: parameters that autograd has a gradient for on this site, besides
            factors.
        blocks: what is computed again.
        state: this site's; unless GOOD it takes part in everything and sends nothing.
        layers: bytes and seconds by layer, filled by the buckets.
        waits: seconds that this site waited for a message with these parameters.
        reading: measures the gradients, if the step is recorded.
        headers: every site's, in the order of ranks.
        used: parameters that have a gradient on some site; the others are left alone, as in DDP.
        skips_bad: whether a step is skipped if a gradient is not finite.
        bad: name of a parameter of which this site's is not.
        share: of this site in the mean gradient, 1 / S where all sites count alike.
        scale: S times that: what is sent as factors is multiplied by it, and divided by S there.
        owed: what was not sent before of a parameter that travels dense, see `Planner.owed`.
        owes: whether there is anything of that kind.
        empty: slots and blocks of which this backward has brought nothing, noted as they are sent.
        without_grad: parameters of which there was nothing in `param.grad`, likewise.
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

    @property
    def computed_s(self) -> float:
        """Seconds spent so far on what is sent, and on computing blocks again."""
        return self.layers.compress_s + self.layers.replay_s

    def take(self, headers: Sequence[Header]) -> None:
        """Goes by these headers of all sites."""
        self.headers = headers
        self.used = frozenset().union(*(compress(self.params, header.used) for header in headers))
        whole = sum(header.weight for header in headers)
        weight, sites = headers[self.comm.rank].weight, len(headers)
        self.share, self.scale = (weight / whole, sites * weight / whole) if whole else (0.0, 0.0)

    def gradient_of(self, slot: Slot, *, tapped: bool) -> Gradient:
        """This site's part: its factors, no rows if it did not use the slot, or what is formed.

        The step is bad if it is not finite.
        """
        announced = self.header.uses[self.index[slot]].rows if tapped else 0
        own = self.factors_of(slot, announced) if tapped else self._formed(slot)
        gradient = scaled(own, self.scale)
        if self.skips_bad:
            self.check(slot.weight, tensors_of(gradient))
        return gradient

    def fill(self, name: str, p: nn.Parameter, out: Tensor) -> None:
        """This site's part of the mean gradient, in a sum over the sites; zeros of a void step."""
        good = self.state == State.GOOD
        if p.grad is None:
            self.without_grad.add(name)
        copy_scaled(name, p, out, self.share if good else 0.0)
        for slot, residual in self.owed(name) if good else ():
            start, stop = slot.weight_rows or (0, p.shape[0])
            part = out.view(p.shape)[start:stop]
            part.add_(as_tensor(residual).reshape(part.shape), alpha=1 / self.comm.world_size)

    def _formed(self, slot: Slot) -> Tensor:
        if self.params[slot.weight].grad is None:
            self.without_grad.add(slot.weight)
        return formed(slot, self.params)

    def lacking(self, names: Collection[str] | None = None) -> set[str]:
        """Parameters that this site's header announced, and that its backward has nothing for.

        That is known once their message is packed. It costs a step nothing in which there are
        gradients of all: nothing is noted then.

        Args:
            names: of which to say so; None of all.
        """
        if not (self.empty or self.without_grad):
            return set()
        for source in self.empty:  # before anything is written
            self.without_grad.update(filter(self._is_empty, source.params))
        found = self.without_grad.intersection(compress(self.params, self.header.used))
        return found if names is None else found.intersection(names)

    def _is_empty(self, name: str) -> bool:
        """Whether neither autograd nor any product has something for a parameter."""
        if self.params[name].grad is not None:
            return False
        uses = ((source, self.header.uses[k]) for source, k in self.index.items())
        captured = (s for s, use in uses if use.tapped and use.rows and name in s.params)
        return all(source in self.empty for source in captured)

    def adds_all_alike(self) -> bool:
        """Whether `fill` would only multiply by the share, whatever the parameter."""
        return self.state == State.GOOD and self.share != 0.0 and not self.owes()

    def check(self, name: str, parts: Sequence[Tensor]) -> None:
        """The step is bad if some part of this site's gradient of a parameter is not finite."""
        if self.skips_bad and self.state == State.GOOD and not all(map(is_finite, parts)):
            self.bad, self.state = name, State.BAD

    def waited_s(self) -> dict[str, float]:
        """By parameter, how long this site waited for the messages that carried it."""
        waited: defaultdict[str, float] = defaultdict(float)
        for names, seconds in self.waits:
            for name in names:
                waited[name] += seconds
        return waited

    def forget(self) -> None:
        """The step starts again."""
        self.layers.forget()
        self.waits.clear()
        self.without_grad.clear()
        if self.reading is not None:
            self.reading.forget()


def copy_scaled(name: str, p: nn.Parameter, out: Tensor, scale: float) -> None:
    """`out = scale * p.grad`; no gradient counts as zero, scale 0 gives zeros."""
    if p.grad is None or scale == 0.0:
        out.zero_()
    else:
        torch.mul(_dense(name, p.grad), scale, out=out)


def formed(slot: Slot, params: Mapping[str, nn.Parameter]) -> Tensor:
    """The slot's part of `param.grad`, (G, O, I); no gradient counts as zero."""
    p, shape = params[slot.weight], (slot.groups, slot.outputs, slot.inputs)
    if p.grad is None:
        return p.new_zeros(shape, requires_grad=False)
    start, stop = slot.weight_rows or (0, p.shape[0])
    return _dense(slot.weight, p.grad)[start:stop].reshape(shape)


def _dense(name: str, gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        raise RuntimeError(f"{name!r} has a sparse gradient: build its layer with sparse=False")
    return gradient
