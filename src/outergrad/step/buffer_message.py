"""The message of a step that synchronises shared buffers, after the last gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outergrad.buckets.bucket import Gathered
from outergrad.core.sent import Kind, Sent, Tap, Way
from outergrad.core.transport import Comm
from outergrad.messages.checksum import combined
from outergrad.messages.header import Header, Join
from outergrad.messages.raw import from_raw, raw
from outergrad.messages.wire import BUFFERS, Preamble, State
from outergrad.step.buffers import RegisteredBuffer, SharedBuffers, Values


class Parties(Protocol):
    """Participants whose buffers are synchronised: the sites of a step, or the ranks of a site."""

    @property
    def headers(self) -> Sequence[Header]:
        """Headers of all participants."""
        ...

    @property
    def comm(self) -> Comm:
        """Transport between the participants."""
        ...

    @property
    def state(self) -> State:
        """State of this participant."""
        ...


class BufferMessage:
    """Synchronisation of buffers in one step.

    The lowest site that has a batch sends its buffers to all. With "mean", each other site that has
    one sends its floating-point buffers, too. A preamble says of each buffer whether it is there.

    Args:
        buffers: buffers of the model.
        context: headers, transport and state of the participants.
        step: number of the step; headers may be predicted ones, of a step before.

    Attributes:
        first: name of the first buffer; empty if nothing is sent.
        sizes: bytes of the messages of all sites; empty if nothing is sent.
        gathered: messages of all sites; None if nothing is sent.
    """

    def __init__(self, buffers: SharedBuffers, context: Parties, step: int) -> None:
        places = buffers.to_send(context.headers)
        self._buffers, self._context, self._step = buffers, context, step
        self._headers, self._rank = context.headers, context.comm.rank
        active = [h.rank for h in self._headers if h.join in (Join.NONE, Join.INSIDE)]
        self._source = min(active, default=0)
        mean = buffers.kind == "mean"
        self._means = [p for p in places if mean and p.dtype.is_floating_point]
        self._taken = [p for p in places if p not in self._means]
        self.gathered: Gathered | None = None
        self._messages: Sequence[Tensor] = ()
        self._preambles: list[Preamble] = []
        self.first = places[0].name if places else ""
        self.sizes = [self._nbytes(header) for header in self._headers] if places else []

    def expect(self, turn: int) -> None:
        """Posts the receives of the other sites' messages in a turn."""
        if self.sizes:
            self._context.comm.expect(self.sizes, turn)

    def start(self) -> None:
        """Sends this site's message."""
        if self.sizes:
            message = self._packed(self.sizes[self._rank])
            if self._context.comm.tap is not None:
                self._tell(self._context.comm.tap)
            work = self._context.comm.all_gather(message, self.sizes)
            self.gathered = Gathered(work, message)

    def _tell(self, tap: Tap) -> None:
        """Tells a tap which buffers this site sends."""
        about = {"way": Way.GATHERED, "step": self._step, "kind": Kind.BUFFER}
        for place in self._sent_by(self._headers[self._rank]):
            if (t := self._buffers.value(place)) is not None:
                tap.sent(Sent(name=place.name, content=t, **about))

    def receive(self) -> int:
        """Waits for the messages of all sites; returns a digest of them.

        Raises:
            RefusedError: a message is not as it was sent.
        """
        if self.gathered is not None:
            self._messages = self.gathered.wait()
            pairs = zip(self._messages, self._headers, strict=True)
            self._preambles = [self._read(*pair) for pair in pairs]
        return combined(preamble.total for preamble in self._preambles)

    def finish(self, *, write: bool) -> None:
        """Writes the agreed values, unless the step is void."""
        if write and self._messages:
            self._buffers.take(self.values())

    def _sent_by(self, site: Header) -> list[RegisteredBuffer]:
        counts = site.weight > 0 or site.rank == self._source
        means = self._means if counts else []
        return [*means, *(self._taken if site.rank == self._source else [])]

    def _nbytes(self, site: Header) -> int:
        places = self._sent_by(site)
        return Preamble.nbytes(len(places), 0) + sum(place.nbytes for place in places)

    def _preamble(self, site: Header, there: Sequence[bool]) -> Preamble:
        own = (site.fingerprint, self._step, BUFFERS, site.rank)
        return Preamble(*own, self._context.state, tuple(there))

    def _packed(self, nbytes: int) -> Tensor:
        header = self._headers[self._rank]
        device, places = self._context.comm.device, self._sent_by(header)
        message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        for place, part in zip(places, _parts(message, places), strict=True):
            if (t := self._buffers.value(place)) is not None:
                part.copy_(raw(t))
        there = [self._buffers.value(place) is not None for place in places]
        self._preamble(header, there).write(message)
        return message

    def _read(self, message: Tensor, site: Header) -> Preamble:
        expected = self._preamble(site, [False] * len(self._sent_by(site)))
        return Preamble.read(message, expected, site.rank)

    def values(self) -> Values:
        """Returns the agreed value of each buffer that was sent; call it after `receive`."""
        if self.gathered is None:
            return {}
        triples = zip(self._messages, self._headers, self._preambles, strict=True)
        found = [_read(message, self._sent_by(site), p.flags) for message, site, p in triples]
        taken = {place: found[self._source].get(place) for place in self._taken}
        return taken | {p: self._mean([part.get(p) for part in found]) for p in self._means}

    def _mean(self, values: Sequence[Tensor | None]) -> Tensor | None:
        """Mean by the gradients' weights, in the order of sites; the source's if all are 0."""
        weights = [h.weight for h in self._headers]
        pairs = [(w, v) for w, v in zip(weights, values, strict=True) if v is not None and w]
        if not pairs:
            return values[self._source]
        whole = sum(weight for weight, _ in pairs)
        parts = [value.double() * (weight / whole) for weight, value in pairs]
        return sum(parts[1:], parts[0])


def _parts(message: Tensor, places: Sequence[RegisteredBuffer]) -> Sequence[Tensor]:
    """Splits a message behind its preamble into the bytes of each buffer."""
    sizes = [place.nbytes for place in places]
    return message[Preamble.nbytes(len(places), 0) :].split(sizes) if places else []


def _read(
    message: Tensor, places: Sequence[RegisteredBuffer], there: Sequence[bool]
) -> dict[RegisteredBuffer, Tensor]:
    found = zip(places, there, _parts(message, places), strict=True)
    return {p: from_raw(part, p.dtype, p.shape) for p, is_there, part in found if is_there}
