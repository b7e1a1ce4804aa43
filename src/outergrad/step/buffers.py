"""Buffers that forwards write to, as running statistics: what becomes of them in a shared step.

Constant tables and masks cost nothing: every site says in its header which buffers were written to
since the last step, and those that some site wrote to travel, as bytes, in one message that goes
with the last gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from outergrad.core.transport import Comm, Work
from outergrad.messages.checksum import combined
from outergrad.messages.header import Header, Join
from outergrad.messages.wire import BUFFERS, Preamble, State

Kind = Literal["broadcast", "mean", "local"]
KINDS: tuple[Kind, ...] = ("broadcast", "mean", "local")
_STATISTICS = ("running_mean", "running_var")
_COUNTER = "num_batches_tracked"


class Parties(Protocol):
    """Whose buffers come together: the sites of a step, or the ranks of one site."""

    @property
    def headers(self) -> Sequence[Header]:
        """What each of them has."""
        ...

    @property
    def comm(self) -> Comm:
        """Between them."""
        ...

    @property
    def state(self) -> State:
        """How this one fares."""
        ...


_Seen = tuple[Tensor | None, int]
"""A buffer and its version."""


@dataclass(frozen=True)
class _Place:
    """Where a buffer is registered, and what it was when the sites agreed on it."""

    name: str
    module: nn.Module
    key: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def tensor(self) -> Tensor | None:
        """What is there now, if it is as it was."""
        t = self.module._buffers.get(self.key)
        fits = t is not None and (t.shape, t.dtype) == (self.shape, self.dtype)
        return t if fits else None

    @property
    def nbytes(self) -> int:
        """On the wire."""
        return self.shape.numel() * self.dtype.itemsize


class SharedBuffers:
    """The buffers of a model that are no site's own.

    One that is replaced by a tensor of another shape or dtype is each site's own from then on.

    Args:
        model: the whole model, or None if nothing is shared.
        kind: what becomes of them.
        local: names of those that each site keeps to itself.
    """

    def __init__(
        self, model: nn.Module | None = None, kind: Kind = "local", local: Collection[str] = ()
    ) -> None:
        self.kind: Kind = kind
        shares = model is not None and kind != "local"
        self._places = list(_places(model, local)) if shares and model is not None else []
        self._statistics = _statistics(self._places)
        self._seen: list[_Seen] = []
        self._pooled: dict[_Place, Tensor | None] | None = None
        self.note()

    @property
    def tensors(self) -> list[Tensor]:
        """All that are as they were, in the order of the model."""
        return [t for place in self._places if (t := place.tensor) is not None]

    @property
    def names(self) -> list[str]:
        """Of all, in the order of the model."""
        return [place.name for place in self._places]

    @property
    def by_name(self) -> dict[str, Tensor | None]:
        """All; None for one that is not as it was."""
        return {place.name: place.tensor for place in self._places}

    def note(self) -> None:
        """What is there now is the same on all sites."""
        self._seen = [(place.tensor, _version(place.tensor)) for place in self._places]

    def none_written(self) -> tuple[bool, ...]:
        """Of a site that ran no forward."""
        return (False,) * len(self._places)

    def written(self) -> tuple[bool, ...]:
        """Which of them have been written to since `note`, as far as one can see."""
        changed = list(map(_changed, self._places, self._seen))
        for k, counter in self._statistics.items():
            trained = changed[counter] if counter is not None else self._places[k].module.training
            changed[k] = changed[k] or (trained and self._places[k].tensor is not None)
        return tuple(changed)

    def pooled(self, message: BufferMessage) -> SharedBuffers:
        """The same as a site of several ranks has them, from the message of its ranks.

        They stand apart from the model until `take_pooled`, which is for a step that counts.
        """
        site = copy.copy(self)
        site._pooled = {}
        site.take(message.values())
        return site

    def take_pooled(self, site: SharedBuffers) -> None:
        """Leaves what `pooled` ones have become in the model."""
        if site._pooled:
            self.take(site._pooled)

    def value(self, place: _Place) -> Tensor | None:
        """What is sent of one."""
        return place.tensor if self._pooled is None else self._pooled.get(place, place.tensor)

    @torch.no_grad()
    def take(self, values: Mapping[_Place, Tensor | None]) -> None:
        """Keeps what was agreed on; of None what was there."""
        if self._pooled is not None:
            self._pooled.update(
                {p: None if t is None else t.to(p.dtype) for p, t in values.items()}
            )
            return
        for place, value in values.items():
            _put(place, value)
        self.note()

    def start(self, context: Parties) -> BufferMessage:
        """Sends what has to be sent; the same on every site."""
        masks = zip(*(header.buffers for header in context.headers), strict=True)
        pairs = zip(self._places, masks, strict=False)
        return BufferMessage(self, [place for place, mask in pairs if any(mask)], context)


class BufferMessage:
    """Buffers under way.

    One site's, the lowest that has a batch, go to all; by "mean" each other site that has one
    sends its floating ones, too. A preamble says of each whether it is there.
    """

    def __init__(self, buffers: SharedBuffers, places: Sequence[_Place], context: Parties) -> None:
        self._buffers, self._context = buffers, context
        self._headers, self._rank = context.headers, context.comm.rank
        active = [h.rank for h in self._headers if h.join in (Join.NONE, Join.INSIDE)]
        self._source = min(active, default=0)
        mean = buffers.kind == "mean"
        self._means = [p for p in places if mean and p.dtype.is_floating_point]
        self._taken = [p for p in places if p not in self._means]
        self._work: Work | None = None
        self._messages: Sequence[Tensor] = ()
        self._preambles: list[Preamble] = []
        self.first = places[0].name if places else ""
        """The name of one of them."""
        if places:
            sizes = [self._nbytes(header) for header in self._headers]
            self._work = context.comm.all_gather(self._packed(sizes[self._rank]), sizes)

    def receive(self) -> int:
        """Waits for those of all sites; a digest of them.

        Raises:
            RefusedError: a message is not as it was sent.
        """
        if self._work is not None:
            self._messages = self._work.wait()
            pairs = zip(self._messages, self._headers, strict=True)
            self._preambles = [self._read(*pair) for pair in pairs]
        return combined(preamble.total for preamble in self._preambles)

    def finish(self, *, write: bool) -> None:
        """Writes what came unless the step is void."""
        if write and self._messages:
            self._buffers.take(self.values())

    def _sent_by(self, site: Header) -> list[_Place]:
        """What a site sends."""
        counts = site.weight > 0 or site.rank == self._source
        means = self._means if counts else []
        return [*means, *(self._taken if site.rank == self._source else [])]

    def _nbytes(self, site: Header) -> int:
        places = self._sent_by(site)
        return Preamble.nbytes(len(places), 0) + sum(place.nbytes for place in places)

    def _preamble(self, site: Header, there: Sequence[bool]) -> Preamble:
        own = (site.fingerprint, site.step, BUFFERS, site.rank)
        return Preamble(*own, self._context.state, tuple(there))

    def _packed(self, nbytes: int) -> Tensor:
        header = self._headers[self._rank]
        device, places = self._context.comm.device, self._sent_by(header)
        message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        for place, part in zip(places, _parts(message, places), strict=True):
            if (t := self._buffers.value(place)) is not None:
                part.copy_(t.detach().contiguous().view(-1).view(torch.uint8))
        there = [self._buffers.value(place) is not None for place in places]
        self._preamble(header, there).write(message)
        return message

    def _read(self, message: Tensor, site: Header) -> Preamble:
        expected = self._preamble(site, [False] * len(self._sent_by(site)))
        return Preamble.read(message, expected, site.rank)

    def values(self) -> dict[_Place, Tensor | None]:
        """What becomes of each that was sent; None where the site whose it is has none."""
        if self._work is None:
            return {}
        triples = zip(self._messages, self._headers, self._preambles, strict=True)
        found = [_read(message, self._sent_by(site), p.flags) for message, site, p in triples]
        taken = {place: found[self._source].get(place) for place in self._taken}
        return taken | {p: self._mean([part.get(p) for part in found]) for p in self._means}

    def _mean(self, values: Sequence[Tensor | None]) -> Tensor | None:
        """By the weights of the gradients, in the order of sites; the source's if all are 0."""
        weights = [h.weight for h in self._headers]
        pairs = [(w, v) for w, v in zip(weights, values, strict=True) if v is not None and w]
        if not pairs:
            return values[self._source]
        whole = sum(weight for weight, _ in pairs)
        parts = [value.double() * (weight / whole) for weight, value in pairs]
        return sum(parts[1:], parts[0])


def _places(model: nn.Module, local: Collection[str]) -> Iterator[_Place]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, t in model.named_buffers():
        prefix, _, key = name.rpartition(".")
        if name not in local and t.numel():
            yield _Place(name, modules[prefix], key, t.shape, t.dtype)


def _statistics(places: Sequence[_Place]) -> dict[int, int | None]:
    """Of running statistics, which PyTorch writes past their version, what counts the batches."""
    counters = {p.module: k for k, p in enumerate(places) if p.key == _COUNTER}
    found = (k for k, place in enumerate(places) if place.key in _STATISTICS)
    return {k: counters.get(places[k].module) for k in found}


def _changed(place: _Place, seen: _Seen) -> bool:
    t = place.tensor
    return t is not None and (t is not seen[0] or _version(t) != seen[1])


def _version(t: Tensor | None) -> int:
    return 0 if t is None or t.is_inference() else t._version


def _parts(message: Tensor, places: Sequence[_Place]) -> Sequence[Tensor]:
    """The bytes of each, behind the preamble."""
    sizes = [place.nbytes for place in places]
    return message[Preamble.nbytes(len(places), 0) :].split(sizes) if places else []


def _read(message: Tensor, places: Sequence[_Place], there: Sequence[bool]) -> dict[_Place, Tensor]:
    parts = zip(places, there, _parts(message, places), strict=True)
    return {
        place: part.clone().view(place.dtype).view(place.shape)  # a copy is aligned for any dtype
        for place, is_there, part in parts
        if is_there
    }


def _put(place: _Place, value: Tensor | None) -> None:
    """Past the version, as PyTorch writes statistics: a graph may have saved them."""
    t = place.tensor
    if t is not None and value is not None:
        t.data.copy_(value)
