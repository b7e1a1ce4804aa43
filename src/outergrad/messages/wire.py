"""Messages of factors: what stands in them, and before it. No pickle."""

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
"""In place of a bucket's index: the message of the buffers."""
DELTAS = 1 << 33
"""And that of the first mean delta below a site's own parts; the others follow it."""


_LACKS = 2.0**-12
_LACKS_BIT = 1 << 8


class State(IntEnum):
    """How a site fares in a step; every message says it."""

    GOOD = 0
    SURPRISED = 1
    """Its batch is not what the plan was made for: the step needs a plan of its own."""
    BAD = 2
    """Its gradient is not finite: the step is skipped."""
    FAILED = 3
    """Its backward raised: nothing of the step may be applied."""

    @property
    def is_void(self) -> bool:
        """Whether it sends nothing that may be applied, also if all start again."""
        return self in (State.BAD, State.FAILED)

    @staticmethod
    def of(surprised: float, void: float) -> State:
        """From how many sites are; what is less than one speaks of parts that they lack."""
        return State.FAILED if void else State.SURPRISED if surprised > 0.5 else State.GOOD

    def counts(self, *, lacks: bool) -> tuple[float, float]:
        """What a site adds to these numbers of surprised and of void ones.

        Args:
            lacks: whether it has nothing for a parameter that it had announced. The sum of up to
                2,047 sites that lack something is less than one that is surprised.
        """
        return float(self == State.SURPRISED) + _LACKS * lacks, float(self.is_void)


@dataclass(frozen=True)
class Piece:
    """One payload of a message.

    Attributes:
        slot: the slot that it is of, or the block.
        rows: R, or how many entries, or bytes.
        dtype: of the numbers, before they are encoded.
        bias: dtype of b_GO; None where it does not travel.
        codecs: that the numbers go through.
        form: what kind of payload it is.
    """

    slot: Any
    rows: int
    dtype: torch.dtype
    bias: torch.dtype | None
    codecs: Codecs = ()
    form: Form = FACTOR_ROWS

    @property
    def nbytes(self) -> int:
        """Bytes on the wire; none without rows."""
        written = (tensor for field in self.fields() for tensor in field.tensors())
        return sum(aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in written)

    def fields(self) -> list[Field]:
        """The tensors that it consists of; none without rows."""
        own = (self.slot, self.rows, self.dtype, self.bias, self.codecs)
        return self.form.fields(*own) if self.rows else []


@dataclass(frozen=True)
class Preamble:
    """What stands before the factors of a message, checked before they are believed.

    Attributes:
        fingerprint: as in `Header`.
        step: as in `Header`.
        bucket: index of the message within the step.
        rank: the sender.
        state: whether the sender could follow the plan.
        flags: per parameter of the bucket, whether it also has a gradient outside its factors.
        wanted_rows: per slot of the bucket, how many rows the sender would send next time.
        total: the checksum of its message, where it was read.
        lacks: whether the sender has nothing for a parameter that it had announced.
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
        """A checksum of what stands in every message of its bucket, whoever it goes to."""
        return sum_of_words([self._state_word, *bit_words(self.flags), *self.wanted_rows])

    @staticmethod
    def nbytes(params: int, slots: int) -> int:
        """Bytes on the wire for a bucket of that many parameters and slots."""
        return aligned(8 * (_FIXED + words_for(params) + slots))

    def write(self, message: Tensor) -> None:
        """Puts it at the start of a message that has all else, with a checksum of that."""
        fixed = [MAGIC, self.fingerprint, self.step, self.bucket, self.rank, self._state_word, 0]
        words = torch.tensor([*fixed, *bit_words(self.flags), *self.wanted_rows], dtype=torch.int64)
        message[: words.nbytes].copy_(words.view(torch.uint8))
        _seal(message)

    @staticmethod
    def read(message: Tensor, expected: Preamble, rank: int) -> Preamble:
        """The preamble of another site's message of the same bucket.

        Raises:
            RefusedError: the message belongs elsewhere, or is not as it was sent.
        """
        (words,) = _words_of([message], expected, rank)
        return Preamble._checked(words, expected, rank)

    @staticmethod
    def _checked(words: Sequence[int], expected: Preamble, rank: int) -> Preamble:
        """The preamble of these words, with the checksum of the message behind them."""
        *words, total = words
        ours = [MAGIC, expected.fingerprint, expected.step, expected.bucket, rank]
        if words[:5] != ours:
            raise RefusedError(
                f"site {rank} sent a message that is not {_named(expected.bucket)} of step "
                f"{expected.step}",
                rank,
            )
        if words[_SUM] != total:
            raise RefusedError(f"the checksum of a message of site {rank} is wrong", rank)
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
            what = f"a message of site {rank} says what cannot be: {error}"
            raise RefusedError(what, rank) from None


def read_all(messages: Sequence[Tensor], expected: Preamble) -> tuple[list[Preamble], State]:
    """The preambles of all sites, checked, and the worst of their states."""
    told = enumerate(_words_of(messages, expected))
    preambles = [Preamble._checked(words, expected, rank) for rank, words in told]
    return preambles, max(preamble.state for preamble in preambles)


def _words_of(messages: Sequence[Tensor], expected: Preamble, first: int = 0) -> list[list[int]]:
    """The words of each preamble, and the checksum of the message: for all one look at the device.

    Args:
        messages: of sites that follow each other.
        expected: how long they are.
        first: the first of these sites.
    """
    size = Preamble.nbytes(len(expected.flags), len(expected.wanted_rows))
    for rank, message in enumerate(messages, first):
        if len(message) < size:
            raise RefusedError(f"site {rank} sent a message of {len(message)} bytes", rank)
    told = [torch.cat([m[:size].view(torch.int64), _sum_of(m)]) for m in messages]
    return torch.stack(told).tolist()


def _named(bucket: int) -> str:
    if bucket == BUFFERS:
        return "that of the buffers"
    return f"mean delta {bucket - DELTAS}" if bucket >= DELTAS else f"bucket {bucket}"


_RANK, _BUCKET, _STATE, _SUM = 4, 3, 5, 6
"""Which word of a preamble says so."""
_FIXED = 7
_FIXED_BYTES = 8 * _FIXED
"""Of a preamble, before what depends on its bucket."""


def _sum_of(message: Tensor) -> Tensor:
    """Of its state and of all that follows, (1,): what stands before is known to who reads it."""
    state = message[8 * _STATE : 8 * _SUM].view(torch.int64)
    return checksum(message[_FIXED_BYTES:]) + state


def _seal(message: Tensor) -> None:
    """Puts in the checksum."""
    message[8 * _SUM : _FIXED_BYTES].view(torch.int64).copy_(_sum_of(message))


def as_from(rank: int, message: Tensor, size: int) -> Tensor:
    """What a site would send that does the same as this one: a copy that names it as its sender.

    Args:
        rank: of that site.
        message: this site's, 1-D: a header (int64), or bytes with a preamble or without.
        size: how long that site's is. Where it holds something else, being of another length or
            what this site has merged, all but the fixed words of the preamble is zeros.
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
    """Whether it is of a second round, in which every site sends what is its own to merge."""
    is_header = message.dtype == torch.int64
    return not is_header and bool(message[:_FIXED_BYTES].view(torch.int64)[_BUCKET] < 0)
