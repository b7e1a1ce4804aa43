"""Headers: each site's announcement of a step, exchanged before anything else is sent."""

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
from outergrad.core.sites import Site
from outergrad.messages.checksum import combined

MAGIC = 0x6F757465726704  # "outerg", version 4 of the format
_FIXED_WORDS = 64
KNOWN = 4
"""Number of leading words of a header or vote that its reader knows beforehand."""
RANK = 3
"""Index of the word that holds the sender."""
_SUM = 8
_BITS = 9
"""Number of words before those that say which parameters are used."""
_PER_WORD = 60
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes that factors are sent in, by code."""
MOST_ROWS = 1 << 41
"""Upper bound, exclusive, of numbers of rows and of bytes in a header; of a weight it is 2^53."""
_MOST_WEIGHT = 1 << 53
_MOST_JOINT = 1 << 31
_MOST_STATE = 1 << 4


class Join(IntEnum):
    """State of a site's loop in `session.join()`; part of every header."""

    NONE = 0
    INSIDE = 1
    OUT = 2
    """The site has no batch left and only takes part in the steps of the others."""
    GONE = 3
    """The site's loop raised: this is the last step that it takes part in."""


@dataclass(frozen=True)
class SlotUse:
    """Use of a slot in one step on one site.

    Attributes:
        rows: N, exact where tapped; otherwise the last known number, for the next step's choice.
        tapped: whether the slot's factors will be captured.
        dtype: of its deltas.
    """

    rows: int
    tapped: bool
    dtype: torch.dtype

    def encode(self) -> int:
        """Returns the use as one word of the header."""
        return self.rows << 4 | DTYPES.index(self.dtype) << 1 | int(self.tapped)

    @staticmethod
    def decode(word: int) -> SlotUse:
        """The inverse of `encode`.

        Raises:
            ValueError: the rows or the dtype are impossible.
        """
        rows, code = bounded("rows:", word >> 4, MOST_ROWS), word >> 1 & 7
        dtype = DTYPES[bounded("a dtype of number", code, len(DTYPES))]
        return SlotUse(rows, bool(word & 1), dtype)


@dataclass(frozen=True)
class BlockUse(SlotUse):
    """Use of a block; `rows` is the number of bytes that the site sends of it."""

    dtype: torch.dtype = torch.uint8

    def encode(self) -> int:
        """Returns the use as one word of the header."""
        return self.rows << 1 | int(self.tapped)

    @staticmethod
    def decode(word: int) -> BlockUse:
        """The inverse of `encode`.

        Raises:
            ValueError: the number of bytes is impossible.
        """
        return BlockUse(bounded("bytes of a block:", word >> 1, MOST_ROWS), bool(word & 1))


@dataclass(frozen=True)
class Header:
    """A site's announcement of a step, sent before anything else.

    Attributes:
        fingerprint: of the model, the method and the versions, as agreed by `distribute`.
        step: number of synchronised steps before this one.
        rank: the sender.
        used: per parameter, whether this site has a gradient for it.
        uses: per slot, and behind these per block, how this site uses it.
        alone: whether no other session of this site shares the group. Only then may later steps
            omit their headers, which tell sessions apart.
        joint: number of averaged deltas below shared parts, and a fingerprint of their shapes.
        weight: relative weight of this site's gradient in the mean.
        join: state of this site's loop in `session.join()`.
        buffers: per shared buffer, whether a forward wrote to it on this site.
        whole: whether this site asks for all that is owed; then all of it travels dense.
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
    whole: bool = False

    def of_step(self, step: int) -> Header:
        """Returns the header with another step; faster than `replace`, since it checks nothing."""
        other = object.__new__(Header)
        vars(other).update(vars(self), step=step)
        return other

    @property
    def facts(self) -> tuple[Hashable, ...]:
        """Fields that the plan of a step depends on."""
        return self.uses, self.about_loop

    @property
    def about_loop(self) -> tuple[Hashable, ...]:
        """Fields among `facts` that do not concern rows."""
        return self.used, self.alone, self.weight, self.join, self.buffers, self.whole

    @property
    def length(self) -> int:
        """Number of words, rounded up: equal for small models, so that a mix-up is detected."""
        flags = words_for(len(self.used)) + words_for(len(self.buffers))
        return math.ceil((_BITS + flags + len(self.uses)) / _FIXED_WORDS) * _FIXED_WORDS

    def words(self) -> list[int]:
        """Returns the header as int64 words."""
        state = self.alone | self.join << 1 | self.whole << 3
        fixed = [MAGIC, self.fingerprint, self.step, self.rank, state]
        words = [*fixed, self.weight, *self.joint, 0, *bit_words(self.used)]
        words += [*bit_words(self.buffers), *(use.encode() for use in self.uses)]
        words += [0] * (self.length - len(words))
        words[_SUM] = sum_of_words(words[KNOWN:])
        return words

    @staticmethod
    def parse(words: Sequence[int], expected: Header, rank: Site) -> Header:
        """Parses another site's header and checks it against this site's own.

        Raises:
            ExchangeError: it is not the header of the same step of the same session, or has invalid
                values.
        """
        if len(words) != expected.length:
            raise ExchangeError(f"{rank.called} sent a header of {len(words)} words")
        magic, fingerprint, step, sender = words[:4]
        if (magic, fingerprint) != (MAGIC, expected.fingerprint):
            raise ExchangeError(
                f"{rank.called} sent something else than the header of this session; do all sites "
                f"call the same distributed models in the same order?"
            )
        if (step, sender) != (expected.step, rank):
            whose = "" if sender == rank else " of another site"
            raise ExchangeError(
                f"{rank.called} sent the header of synchronised backward {step}{whose}, this site "
                f"is in {expected.step}; every site must run the same number"
            )
        unsummed = [*words[KNOWN:_SUM], 0, *words[_BITS:]]
        if words[_SUM] != sum_of_words(unsummed):
            raise ExchangeError(f"the checksum of the header of {rank.called} is wrong")
        try:
            return Header._decoded(words, expected, rank)
        except ValueError as error:
            raise ExchangeError(
                f"the header of {rank.called} says what cannot be: {error}"
            ) from None

    @staticmethod
    def _decoded(words: Sequence[int], expected: Header, rank: Site) -> Header:
        state = bounded("a state of", words[4], _MOST_STATE)
        join, weight = Join(state >> 1 & 3), bounded("a weight of", words[5], _MOST_WEIGHT)
        _check_join(rank, join, expected)
        after = _BITS + words_for(len(expected.used))
        used = bits(words[_BITS:], len(expected.used))
        start = after + words_for(len(expected.buffers))
        buffers = bits(words[after:], len(expected.buffers))
        ours = zip(expected.uses, words[start:], strict=False)
        uses = tuple(use.decode(word) for use, word in ours)
        own = (expected.fingerprint, expected.step, rank)
        joint = bounded("joint deltas:", words[6], _MOST_JOINT), words[7]
        loop = (weight, join, buffers, bool(state >> 3))
        return Header(*own, used, uses, bool(state & 1), joint, *loop)


def _check_join(rank: Site, join: Join, expected: Header) -> None:
    if (join == Join.NONE) != (expected.join == Join.NONE):
        where, here = ("not " if one == Join.NONE else "" for one in (join, expected.join))
        raise ExchangeError(
            f"{rank.called} is {where}inside session.join(), this site is "
            f"{here}inside; all sites must run their loops in it, or none"
        )


def bounded(what: str, value: int, most: int) -> int:
    """Returns a number that another site sent, if it is at least 0 and below `most`.

    Raises:
        ValueError: it is not; the error begins with `what`.
    """
    if not 0 <= value < most:
        raise ValueError(f"{what} {value}")
    return value


def digest(words_S: Sequence[Sequence[int]]) -> int:
    """Digest of all sites' headers; differs between sites that received different ones."""
    return combined(words[_SUM] for words in words_S)


def sum_of_words(words: Sequence[int]) -> int:
    """Checksum of int64 words, which detects every change within 32 consecutive bits."""
    return zlib.crc32(struct.pack(f"{len(words)}q", *words))


def words_for(count: int) -> int:
    """Number of words that `count` flags take."""
    return math.ceil(count / _PER_WORD)


def bit_words(flags: Sequence[bool]) -> list[int]:
    """Packs flags into int64 words, the first in the lowest bit."""
    parts = (flags[i : i + _PER_WORD] for i in range(0, len(flags), _PER_WORD))
    return [sum(map((1).__lshift__, compress(range(len(part)), part))) for part in parts]


def bits(words: Sequence[int], count: int) -> tuple[bool, ...]:
    """The inverse of `bit_words`."""
    return _bits(tuple(words[: words_for(count)]), count)


@lru_cache(maxsize=256)
def _bits(words: tuple[int, ...], count: int) -> tuple[bool, ...]:
    return tuple(bool(words[i // _PER_WORD] >> i % _PER_WORD & 1) for i in range(count))
