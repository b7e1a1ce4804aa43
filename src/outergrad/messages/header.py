"""The header that starts a step: what each site says of it before anything else is sent."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import compress

import torch

from outergrad.core.errors import ExchangeError
from outergrad.messages.checksum import combined

MAGIC = 0x6F757465726704  # "outerg", version 4 of the format
_FIXED_WORDS = 64
KNOWN = 4
"""Words of a header and of a vote, at the start, that whoever reads them knows beforehand."""
RANK = 3
"""Which of them is the sender."""
_SUM = 8
_BITS = 9
"""Words of a header before those that say which parameters are used."""
_PER_WORD = 60
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes that factors travel in, by code."""
MOST_ROWS = 1 << 41
"""Above what a site may say of rows and of bytes; what it says of a weight is below 2^53."""
_MOST_WEIGHT = 1 << 53
_MOST_JOINT = 1 << 31


class Join(IntEnum):
    """Where a site is in `session.join()`; every header says it."""

    NONE = 0
    INSIDE = 1
    OUT = 2
    """It has no batch left and only takes part in the steps of the others."""
    GONE = 3
    """Its loop raised: this is the last step that it takes part in."""


@dataclass(frozen=True)
class SlotUse:
    """How a slot is used in one step on one site.

    Attributes:
        rows: N, exact where tapped; where not, what was last seen, for the next step's choice.
        tapped: whether its factors will be captured.
        dtype: of its deltas.
    """

    rows: int
    tapped: bool
    dtype: torch.dtype

    def encode(self) -> int:
        """One word of the header."""
        return self.rows << 4 | DTYPES.index(self.dtype) << 1 | int(self.tapped)

    @staticmethod
    def decode(word: int) -> SlotUse:
        """The inverse of `encode`.

        Raises:
            ValueError: the rows or the dtype cannot be.
        """
        rows, code = bounded("rows:", word >> 4, MOST_ROWS), word >> 1 & 7
        dtype = DTYPES[bounded("a dtype of number", code, len(DTYPES))]
        return SlotUse(rows, bool(word & 1), dtype)


@dataclass(frozen=True)
class BlockUse(SlotUse):
    """How a block is used: its rows are the bytes that the site sends of it."""

    dtype: torch.dtype = torch.uint8

    def encode(self) -> int:
        """One word of the header."""
        return self.rows << 1 | int(self.tapped)

    @staticmethod
    def decode(word: int) -> BlockUse:
        """The inverse of `encode`.

        Raises:
            ValueError: so many bytes cannot be.
        """
        return BlockUse(bounded("bytes of a block:", word >> 1, MOST_ROWS), bool(word & 1))


@dataclass(frozen=True)
class Header:
    """What a site says of a step before anything else is sent.

    Attributes:
        fingerprint: of the model, the method and the versions, as agreed by `distribute`.
        step: synchronised steps before this one.
        rank: the sender.
        used: per parameter, whether this site has a gradient for it.
        uses: per slot, and behind these per block, how this site uses it.
        alone: whether no other session of this site shares the group: only then may later steps
            leave their headers out, which tell sessions apart.
        joint: how many deltas are averaged below shared parts, and a fingerprint of their shapes.
        weight: how much this site's gradient counts beside the others'.
        join: where this site is in `session.join()`.
        buffers: per buffer that the sites share, whether forwards wrote to it on this site.
    """

    fingerprint: int
    step: int
    rank: int
    used: tuple[bool, ...]
    uses: tuple[SlotUse, ...]
    alone: bool = True
    joint: tuple[int, int] = (0, 0)
    weight: int = 1
    join: Join = Join.NONE
    buffers: tuple[bool, ...] = ()

    def of_step(self, step: int) -> Header:
        """The same of another step; quicker than `replace`, because nothing is checked anew."""
        other = object.__new__(Header)
        vars(other).update(vars(self), step=step)
        return other

    @property
    def facts(self) -> tuple[Hashable, ...]:
        """What the plan of a step depends on."""
        return self.uses, self.about_loop

    @property
    def about_loop(self) -> tuple[Hashable, ...]:
        """What of it is not about rows."""
        return self.used, self.alone, self.weight, self.join, self.buffers

    @property
    def length(self) -> int:
        """In words; small models share one, so that a mix-up is seen, not fatal."""
        flags = words_for(len(self.used)) + words_for(len(self.buffers))
        return math.ceil((_BITS + flags + len(self.uses)) / _FIXED_WORDS) * _FIXED_WORDS

    def words(self) -> list[int]:
        """Its int64 words."""
        fixed = [MAGIC, self.fingerprint, self.step, self.rank, int(self.alone) | self.join << 1]
        words = [*fixed, self.weight, *self.joint, 0, *bit_words(self.used)]
        words += [*bit_words(self.buffers), *(use.encode() for use in self.uses)]
        words += [0] * (self.length - len(words))
        words[_SUM] = sum_of_words(words[KNOWN:])
        return words

    @staticmethod
    def parse(words: Sequence[int], expected: Header, rank: int) -> Header:
        """Another site's header, checked against this site's own.

        Raises:
            ExchangeError: it is not the header of the same step of the same session, or says what
                cannot be.
        """
        if len(words) != expected.length:
            raise ExchangeError(f"site {rank} sent a header of {len(words)} words")
        magic, fingerprint, step, sender = words[:4]
        if (magic, fingerprint) != (MAGIC, expected.fingerprint):
            raise ExchangeError(
                f"site {rank} sent something else than the header of this session; do all sites "
                f"call the same distributed models in the same order?"
            )
        if (step, sender) != (expected.step, rank):
            raise ExchangeError(
                f"site {rank} sent the header of synchronised backward {step} of site {sender}, "
                f"this site ({expected.rank}) is in {expected.step}; every site must run the same "
                f"number"
            )
        unsummed = [*words[KNOWN:_SUM], 0, *words[_BITS:]]
        if words[_SUM] != sum_of_words(unsummed):
            raise ExchangeError(f"the checksum of the header of site {rank} is wrong")
        try:
            return Header._decoded(words, expected, rank)
        except ValueError as error:
            raise ExchangeError(f"the header of site {rank} says what cannot be: {error}") from None

    @staticmethod
    def _decoded(words: Sequence[int], expected: Header, rank: int) -> Header:
        join, weight = Join(words[4] >> 1), bounded("a weight of", words[5], _MOST_WEIGHT)
        _check_join(rank, join, expected)
        after = _BITS + words_for(len(expected.used))
        used = bits(words[_BITS:], len(expected.used))
        start = after + words_for(len(expected.buffers))
        buffers = bits(words[after:], len(expected.buffers))
        ours = zip(expected.uses, words[start:], strict=False)
        uses = tuple(use.decode(word) for use, word in ours)
        own = (expected.fingerprint, expected.step, rank)
        joint = bounded("joint deltas:", words[6], _MOST_JOINT), words[7]
        loop = (weight, join, buffers)
        return Header(*own, used, uses, bool(words[4] & 1), joint, *loop)


def _check_join(rank: int, join: Join, expected: Header) -> None:
    if (join == Join.NONE) != (expected.join == Join.NONE):
        where, here = ("not " if one == Join.NONE else "" for one in (join, expected.join))
        raise ExchangeError(
            f"site {rank} is {where}inside session.join(), this site ({expected.rank}) is "
            f"{here}inside; all sites must run their loops in it, or none"
        )


def bounded(what: str, value: int, most: int) -> int:
    """A number that another site sent, if it is at least 0 and below `most`.

    Raises:
        ValueError: it is not.
    """
    if not 0 <= value < most:
        raise ValueError(f"{what} {value}")
    return value


def digest(words_S: Sequence[Sequence[int]]) -> int:
    """Of the headers of all sites: where it differs, a site sent different ones."""
    return combined(words[_SUM] for words in words_S)


def sum_of_words(words: Sequence[int]) -> int:
    """A checksum of int64 words, which sees every change within 32 bits in a row."""
    return zlib.crc32(struct.pack(f"{len(words)}q", *words))


def words_for(count: int) -> int:
    """How many words that many flags take."""
    return math.ceil(count / _PER_WORD)


def bit_words(flags: Sequence[bool]) -> list[int]:
    """Flags as int64 words, the first in the lowest bit."""
    parts = (flags[i : i + _PER_WORD] for i in range(0, len(flags), _PER_WORD))
    return [sum(map((1).__lshift__, compress(range(len(part)), part))) for part in parts]


def bits(words: Sequence[int], count: int) -> tuple[bool, ...]:
    """The inverse of `bit_words`."""
    return _bits(tuple(words[: words_for(count)]), count)


@lru_cache(maxsize=256)
def _bits(words: tuple[int, ...], count: int) -> tuple[bool, ...]:
    return tuple(bool(words[i // _PER_WORD] >> i % _PER_WORD & 1) for i in range(count))
