"""Preambles and pieces of messages of factors. No pickle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from outergrad.core.coding import Codecs, Field, aligned
from outergrad.core.errors import RefusedError
from outergrad.core.payload import FACTOR_ROWS, Form
from outergrad.messages.checksum import checksum
from outergrad.messages.header import (
    MAGIC,
    MOST_ROWS,
    RANK,
    bit_words,
    bits,
    bounded,
    sum_of_words,
    words_for,
)

BUFFERS = 1 << 32
"""Bucket index of the message of the buffers."""
DELTAS = 1 << 33
"""Bucket index of the first mean delta below a site's own parts; the others follow it."""


_LACKS = 2.0**-12
_LACKS_BIT = 1 << 8


class State(IntEnum):
    """A site's state in a step; part of every message."""

    GOOD = 0
    SURPRISED = 1
    """The site's batch does not fit the plan: the step needs a plan of its own."""
    BAD = 2
    """The site's gradient is not finite: the step is skipped."""
    FAILED = 3
    """The site's backward raised: nothing of the step may be applied."""

    @property
    def is_void(self) -> bool:
        """True if the site sends nothing that may be applied, even if the step starts again."""
        return self in (State.BAD, State.FAILED)

    @staticmethod
    def of(surprised: float, void: float) -> State:
        """Returns the worst state from summed `counts`; fractions of `surprised` are ignored."""
        return State.FAILED if void else State.SURPRISED if surprised > 0.5 else State.GOOD

    def counts(self, *, lacks: bool) -> tuple[float, float]:
        """Returns a site's contribution to the summed counts of surprised and of void sites.

        Args:
            lacks: whether it has no gradient for a parameter that it had announced. The sum of up
                to 2,047 sites that lack something is less than one that is surprised.
        """
        return float(self == State.SURPRISED) + _LACKS * lacks, float(self.is_void)


@dataclass(frozen=True)
class Piece:
    """One payload of a message.

    Attributes:
        slot: the slot or block of the payload.
        rows: R, or the number of entries or bytes.
        dtype: of the numbers, before they are encoded.
        bias: dtype of b_GO; None where it is not sent.
        codecs: that the numbers are encoded with.
        form: kind of the payload.
    """

    slot: Any
    rows: int
    dtype: torch.dtype
    bias: torch.dtype | None
    codecs: Codecs = ()
    form: Form = FACTOR_ROWS

    @property
    def nbytes(self) -> int:
        """Bytes on the wire; 0 without rows."""
        written = (tensor for field in self.fields() for tensor in field.tensors())
        return sum(aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in written)

    def fields(self) -> list[Field]:
        """Returns the tensors that it consists of; none without rows."""
        own = (self.slot, self.rows, self.dtype, self.bias, self.codecs)
        return self.form.fields(*own) if self.rows else []


@dataclass(frozen=True)
class Preamble:
    """Start of a message of factors, checked before the rest is used.

    Attributes:
        fingerprint: as in `Header`.
        step: as in `Header`.
        bucket: index of the message within the step.
        rank: the sender.
        state: whether the sender could follow the plan.
        flags: per parameter of the bucket, whether it also has a gradient outside its factors.
        wanted_rows: per slot of the bucket, the rows that the sender would like to send next time.
        total: the checksum of its message, in a preamble that was read.
        lacks: whether the sender has no gradient for a parameter that it had announced.
    """

    fingerprint: int
    step: int
    bucket: int
    rank: int
    state: State
    flags: tuple[bool, ...]
    wanted_rows: tuple[int, ...] = ()
    total: int = field(default=0, compare=False)
    lacks: bool = False

    @property
    def _state_word(self) -> int:
        return self.state | _LACKS_BIT * self.lacks

    @property
    def said(self) -> int:
        """Checksum of the fields that are equal in a bucket's messages to all sites."""
        return sum_of_words([self._state_word, *bit_words(self.flags), *self.wanted_rows])

    @staticmethod
    def nbytes(params: int, slots: int) -> int:
        """Bytes on the wire for a bucket of that many parameters and slots."""
        return aligned(8 * (_FIXED + words_for(params) + slots))

    def write(self, message: Tensor) -> None:
        """Writes the preamble into an otherwise complete message, with the message's checksum."""
        fixed = [MAGIC, self.fingerprint, self.step, self.bucket, self.rank, self._state_word, 0]
        words = torch.tensor([*fixed, *bit_words(self.flags), *self.wanted_rows], dtype=torch.int64)
        message[: words.nbytes].copy_(words.view(torch.uint8))
        _seal(message)

    @staticmethod
    def read(message: Tensor, expected: Preamble, rank: int) -> Preamble:
        """Returns the preamble of another site's message of the same bucket.

        Raises:
            RefusedError: the message belongs elsewhere, or is damaged.
        """
        (words,) = _words_of([message], expected, rank)
        return Preamble._checked(words, expected, rank)

    @staticmethod
    def _checked(words: Sequence[int], expected: Preamble, rank: int) -> Preamble:
        """Parses a preamble's words; the last one is the computed checksum of the message."""
        *words, total = words
        ours = [MAGIC, expected.fingerprint, expected.step, expected.bucket, rank]
        if words[:5] != ours:
            raise RefusedError(
                f"a message is not {_named(expected.bucket)} of step {expected.step}",
                rank,
            )
        if words[_SUM] != total:
            raise RefusedError("the checksum of a message is wrong", rank)
        flags = bits(words[_FIXED:], len(expected.flags))
        start = _FIXED + words_for(len(flags))
        told = words[start : start + len(expected.wanted_rows)]
        own = (expected.fingerprint, expected.step, expected.bucket, rank)
        try:
            for extreme in (min(told), max(told)) if told else ():
                bounded("rows:", extreme, MOST_ROWS)
            lacks, state = bool(words[_STATE] & _LACKS_BIT), State(words[_STATE] & ~_LACKS_BIT)
            return Preamble(*own, state, flags, tuple(told), total, lacks)
        except ValueError as error:
            raise RefusedError(f"a message says what cannot be: {error}", rank) from None


def read_all(messages: Sequence[Tensor], expected: Preamble) -> tuple[list[Preamble], State]:
    """Returns the checked preambles of all sites, and the worst of their states.

    Raises:
        RefusedError: a message belongs elsewhere, or is damaged.
    """
    told = enumerate(_words_of(messages, expected))
    preambles = [Preamble._checked(words, expected, rank) for rank, words in told]
    return preambles, max(preamble.state for preamble in preambles)


def _words_of(messages: Sequence[Tensor], expected: Preamble, first: int = 0) -> list[list[int]]:
    """Each preamble's words and its message's checksum; one transfer from the device for all.

    Args:
        messages: of consecutive sites.
        expected: a preamble of the same length.
        first: the first of these sites.
    """
    size = Preamble.nbytes(len(expected.flags), len(expected.wanted_rows))
    for rank, message in enumerate(messages, first):
        if len(message) < size:
            raise RefusedError(f"a message has {len(message)} bytes", rank)
    told = [torch.cat([m[:size].view(torch.int64), _sum_of(m)]) for m in messages]
    return torch.stack(told).tolist()


def _named(bucket: int) -> str:
    if bucket == BUFFERS:
        return "that of the buffers"
    return f"mean delta {bucket - DELTAS}" if bucket >= DELTAS else f"bucket {bucket}"


_RANK, _BUCKET, _STATE, _SUM = 4, 3, 5, 6
"""Indices of words in a preamble."""
_FIXED = 7
_FIXED_BYTES = 8 * _FIXED
"""Bytes of a preamble before the part that depends on its bucket."""


def _sum_of(message: Tensor) -> Tensor:
    """Checksum of the state and everything behind it, (1,); the reader knows the words before."""
    state = message[8 * _STATE : 8 * _SUM].view(torch.int64)
    return checksum(message[_FIXED_BYTES:]) + state


def _seal(message: Tensor) -> None:
    message[8 * _SUM : _FIXED_BYTES].view(torch.int64).copy_(_sum_of(message))


def as_from(rank: int, message: Tensor, size: int) -> Tensor:
    """Returns this site's message as another site would send it: a copy with that site's rank.

    Args:
        rank: of that site.
        message: this site's, 1-D: a header (int64), or bytes with a preamble or without.
        size: length of that site's message. If its content would differ (another length, or rows
            merged in a second round), everything but the preamble's fixed words is zeros.
    """
    copy = message.new_zeros(size)
    fixed = min(_FIXED_BYTES // message.itemsize, size, len(message))
    copy[:fixed] = message[:fixed]
    words = copy.view(torch.uint8)[:_FIXED_BYTES]
    marked = len(words) == _FIXED_BYTES and bool(words[:8].view(torch.int64) == MAGIC)
    if size == len(message) and not (marked and _is_second(copy)):
        copy[fixed:] = message[fixed:]
    if marked:
        place = RANK if message.dtype == torch.int64 else _RANK
        words.view(torch.int64)[place] = rank
        if message.dtype != torch.int64:
            _seal(copy)
    return copy


def _is_second(message: Tensor) -> bool:
    is_header = message.dtype == torch.int64
    return not is_header and bool(message[:_FIXED_BYTES].view(torch.int64)[_BUCKET] < 0)
