"""What travels: the header that starts a step, and messages of factors. No pickle."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from outergrad._coding import Codecs, Field, aligned
from outergrad._types import ExchangeError, RefusedError, Slot
from outergrad.comm.checksum import checksum

MAGIC = 0x6F757465726703  # "outerg", version 3 of the format
_FIXED_WORDS = 64
KNOWN = 4
"""Words of a header and of a vote, at the start, that whoever reads them knows beforehand."""
_HEADER_SUM = 8
_BITS = 9
"""Words of a header before those that say which parameters are used."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes that factors travel in, by code."""


class Join(IntEnum):
    """Where a site is in `session.join()`; every header says it."""

    NONE = 0
    INSIDE = 1
    OUT = 2
    """It has no batch left and only takes part in the steps of the others."""
    GONE = 3
    """Its loop raised: this is the last step that it takes part in."""


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
        """From how many sites are."""
        return State.FAILED if void else State.SURPRISED if surprised else State.GOOD


@dataclass(frozen=True)
class Use:
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
    def decode(word: int) -> Use:
        """The inverse of `encode`."""
        return Use(word >> 4, bool(word & 1), DTYPES[word >> 1 & 7])


@dataclass(frozen=True)
class BlockUse:
    """How a block is used in one step on one site.

    Attributes:
        nbytes: of what the site sends of it; about that, where it was not captured.
        tapped: whether it will be captured.
    """

    nbytes: int
    tapped: bool

    def encode(self) -> int:
        """One word of the header."""
        return self.nbytes << 1 | int(self.tapped)

    @staticmethod
    def decode(word: int) -> BlockUse:
        """The inverse of `encode`."""
        return BlockUse(word >> 1, bool(word & 1))


@dataclass(frozen=True)
class Header:
    """What a site says of a step before anything else is sent.

    Attributes:
        fingerprint: of the model, the method and the versions, as agreed by `distribute`.
        step: synchronised steps before this one.
        rank: the sender.
        used: per parameter, whether this site has a gradient for it.
        uses: per slot, how this site uses it.
        alone: whether no other session of this site shares the group: only then may later steps
            leave their headers out, which tell sessions apart.
        blocks: per block, how this site uses it.
        joint: how many deltas are averaged below shared parts, and a fingerprint of their shapes.
        weight: how much this site's gradient counts beside the others'.
        join: where this site is in `session.join()`.
        buffers: per buffer that the sites share, whether forwards wrote to it on this site.
    """

    fingerprint: int
    step: int
    rank: int
    used: tuple[bool, ...]
    uses: tuple[Use, ...]
    alone: bool = True
    blocks: tuple[BlockUse, ...] = ()
    joint: tuple[int, int] = (0, 0)
    weight: int = 1
    join: Join = Join.NONE
    buffers: tuple[bool, ...] = ()

    @property
    def facts(self) -> tuple[Hashable, ...]:
        """What the plan of a step depends on."""
        return self.uses, self.blocks, self.about_loop

    @property
    def about_loop(self) -> tuple[Hashable, ...]:
        """What of it is not about rows."""
        return self.used, self.alone, self.weight, self.join, self.buffers

    def words(self) -> list[int]:
        """Its int64 words; small models share one length, so that a mix-up is seen, not fatal."""
        fixed = [MAGIC, self.fingerprint, self.step, self.rank, int(self.alone) | self.join << 1]
        words = [*fixed, self.weight, *self.joint, 0, *_bit_words(self.used)]
        words += [*_bit_words(self.buffers), *(use.encode() for use in self.uses)]
        words += [use.encode() for use in self.blocks]
        padded = math.ceil(len(words) / _FIXED_WORDS) * _FIXED_WORDS
        words += [0] * (padded - len(words))
        words[_HEADER_SUM] = sum_of_words(words[KNOWN:])
        return words

    @staticmethod
    def parse(words: Sequence[int], expected: Header, rank: int) -> Header:
        """Another site's header, checked against this site's own.

        Raises:
            ExchangeError: it is not the header of the same step of the same session.
        """
        magic, fingerprint, step, sender = words[:4]
        if (magic, fingerprint) != (MAGIC, expected.fingerprint):
            raise ExchangeError(
                f"site {rank} sent something else than the header of this session; do all sites "
                f"call the same distributed models in the same order?"
            )
        if (step, sender) != (expected.step, rank):
            raise ExchangeError(
                f"site {sender} is in its synchronised backward {step}, this site "
                f"({expected.rank}) in {expected.step}; every site must run the same number"
            )
        unsummed = [*words[KNOWN:_HEADER_SUM], 0, *words[_BITS:]]
        if words[_HEADER_SUM] != sum_of_words(unsummed):
            raise ExchangeError(f"the checksum of the header of site {rank} is wrong")
        join = Join(words[4] >> 1)
        _check_join(rank, join, expected)
        after = _BITS + math.ceil(len(expected.used) / 60)
        used = _bits(words[_BITS:], len(expected.used))
        start = after + math.ceil(len(expected.buffers) / 60)
        buffers = _bits(words[after:], len(expected.buffers))
        middle = start + len(expected.uses)
        stop = middle + len(expected.blocks)
        uses = tuple(Use.decode(word) for word in words[start:middle])
        blocks = tuple(BlockUse.decode(word) for word in words[middle:stop])
        own, joint = (fingerprint, step, sender), (words[6], words[7])
        loop = (words[5], join, buffers)
        return Header(*own, used, uses, bool(words[4] & 1), blocks, joint, *loop)


def _check_join(rank: int, join: Join, expected: Header) -> None:
    if (join == Join.NONE) != (expected.join == Join.NONE):
        where, here = ("not " if one == Join.NONE else "" for one in (join, expected.join))
        raise ExchangeError(
            f"site {rank} is {where}inside session.join(), this site ({expected.rank}) is "
            f"{here}inside; all sites must run their loops in it, or none"
        )


def sum_of_words(words: Sequence[int]) -> int:
    """A checksum of int64 words, which sees every change within 32 bits in a row."""
    return zlib.crc32(struct.pack(f"{len(words)}q", *words))


def _pack_bits(bits: Sequence[bool]) -> int:
    return sum(1 << i for i, bit in enumerate(bits) if bit)


def _bit_words(bits: Sequence[bool]) -> list[int]:
    return [_pack_bits(bits[i : i + 60]) for i in range(0, len(bits), 60)]


def _bits(words: Sequence[int], count: int) -> tuple[bool, ...]:
    return tuple(bool(words[i // 60] >> i % 60 & 1) for i in range(count))


@dataclass(frozen=True)
class Piece:
    """The factors of one slot inside a message.

    Attributes:
        slot: the slot.
        rows: R.
        dtype: of the rows, before they are encoded.
        bias: dtype of b_GO; None where it does not travel.
        codecs: of deltas and activations; ids and bias gradients travel as they are.
    """

    slot: Slot
    rows: int
    dtype: torch.dtype
    bias: torch.dtype | None
    codecs: Codecs = ()

    @property
    def nbytes(self) -> int:
        """Bytes on the wire; none without rows."""
        written = (tensor for field in self.fields() for tensor in field.tensors())
        return sum(aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in written)

    def fields(self) -> list[Field]:
        """Its deltas, its activations or ids, and its bias gradient, if it has any."""
        slot, rows = self.slot, self.rows
        if not rows:
            return []
        deltas = Field((slot.groups, rows, slot.outputs), self.dtype, self.codecs)
        if slot.lookup:
            return [deltas, Field((rows,), torch.int64)]
        activations = Field((slot.groups, rows, slot.inputs), self.dtype, self.codecs)
        biases = [Field((slot.groups, slot.outputs), self.bias)] if self.bias else []
        return [deltas, activations, *biases]


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
    """

    fingerprint: int
    step: int
    bucket: int
    rank: int
    state: State
    flags: tuple[bool, ...]
    wanted_rows: tuple[int, ...] = ()

    @staticmethod
    def nbytes(params: int, slots: int) -> int:
        """Bytes on the wire for a bucket of that many parameters and slots."""
        return aligned(8 * (_FIXED + math.ceil(params / 60) + slots))

    def write(self, message: Tensor) -> None:
        """Puts it at the start of a message that has all else, with a checksum of that."""
        bits = [_pack_bits(self.flags[i : i + 60]) for i in range(0, len(self.flags), 60)]
        fixed = [MAGIC, self.fingerprint, self.step, self.bucket, self.rank, self.state, 0]
        words = torch.tensor([*fixed, *bits, *self.wanted_rows], dtype=torch.int64)
        message[: words.nbytes].copy_(words.view(torch.uint8))
        _seal(message)

    @staticmethod
    def read(message: Tensor, expected: Preamble, rank: int) -> Preamble:
        """The preamble of another site's message of the same bucket.

        Raises:
            RefusedError: the message belongs elsewhere, or is not as it was sent.
        """
        size = Preamble.nbytes(len(expected.flags), len(expected.wanted_rows))
        words = message[:size].view(torch.int64).tolist()
        ours = [MAGIC, expected.fingerprint, expected.step, expected.bucket, rank]
        if words[:5] != ours:
            raise RefusedError(
                f"site {rank} sent a message that is not bucket {expected.bucket} of step "
                f"{expected.step}",
                rank,
            )
        if words[_SUM] != _sum_of(message):
            raise RefusedError(f"the checksum of a message of site {rank} is wrong", rank)
        flags = [bool(words[_FIXED + i // 60] >> i % 60 & 1) for i in range(len(expected.flags))]
        start = _FIXED + math.ceil(len(flags) / 60)
        wanted_rows = tuple(words[start : start + len(expected.wanted_rows)])
        step, bucket = expected.step, expected.bucket
        return Preamble(words[1], step, bucket, rank, State(words[5]), tuple(flags), wanted_rows)


_HEADER_RANK, _PREAMBLE_RANK, _PREAMBLE_BUCKET, _STATE, _SUM = 3, 4, 3, 5, 6
"""Which word of a header, and of a preamble, says so."""
_FIXED = 7
_FIXED_BYTES = 8 * _FIXED
"""Of a preamble, before what depends on its bucket."""


def _sum_of(message: Tensor) -> int:
    """Of its state and of all that follows: what stands before is known to who reads it."""
    state = message[8 * _STATE : 8 * _SUM].view(torch.int64)
    return int((checksum(message[_FIXED_BYTES:]) + state).item())


def _seal(message: Tensor) -> None:
    """Puts in the checksum."""
    message[8 * _SUM : _FIXED_BYTES].view(torch.int64).fill_(_sum_of(message))


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
        place = _HEADER_RANK if message.dtype == torch.int64 else _PREAMBLE_RANK
        words.view(torch.int64)[place] = rank
        if message.dtype != torch.int64:
            _seal(copy)
    return copy


def _is_second(message: Tensor) -> bool:
    """Whether it is of a second round, in which every site sends what is its own to merge."""
    is_header = message.dtype == torch.int64
    return not is_header and bool(message[:_FIXED_BYTES].view(torch.int64)[_PREAMBLE_BUCKET] < 0)
