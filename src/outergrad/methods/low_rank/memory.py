"""Memory of each slot from step to step: start directions and residual."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from outergrad.core.coding import Codecs, decode_all, encode_all, received
from outergrad.core.payload import EncodedRows
from outergrad.core.types import Factors, Gradient, Inheritance, Place, Slot, StateDict, place_name
from outergrad.linalg.low_rank import small_core
from outergrad.linalg.outer import stack
from outergrad.methods.residuals import ByPlace, inherited_residual, saved_residual

_GROUP = 64
"""Numbers that share a quantisation step."""
_HALF = 32
"""Bound of the multiples of a step, in magnitude."""
_RANGE, _MOST = 96, 1000
"""Exponents up to which float64 numbers are not scaled, and the largest exponent of a scale beyond:
both the scale and its inverse are in the range of float64."""
_TOGETHER = 4
"""Rows whose highest bits share bytes."""
_PLACES, _TURNS = 0xC13FA9A9, 0x91E10DA5
"""2^32 over the plastic number and over its square: sums of their multiples are spread evenly."""
_LOW, _HIGH, _SIGN = 0x0F0F0F0F0F0F0F0F, 0x0303030303030303, 0x2020202020202020
"""Masks of each byte of a word of eight: the lowest four bits, the lowest two, and the sixth."""


@dataclass(frozen=True)
class Packed:
    """A matrix in six bits and a quarter per number, in a buffer that others may share.

    Attributes:
        written: Result of `_encoded` for its numbers, row behind row, and those of the others.
        shape: Shape of the matrix.
        start: Index of its first number.
        exponent: Power of two to multiply its numbers by; not 0 only for float64 numbers that are
            out of float32's range.
    """

    written: tuple[Tensor, Tensor]
    shape: torch.Size
    start: int = 0
    exponent: int = 0

    def unpacked(self) -> Tensor:
        """Returns the matrix in float32, or in float64 where that is out of its range."""
        return self._cut(_decoded(*self.written))

    def _cut(self, numbers: Tensor) -> Tensor:
        found = numbers[self.start : self.start + self.shape.numel()].view(self.shape)
        return found.double() * 2.0**self.exponent if self.exponent else found


def packed(matrices: Sequence[Tensor], turn: int) -> list[Packed]:
    """Packs matrices of finite numbers in one buffer.

    Args:
        matrices: Small matrices, or a single one of any size.
        turn: Number that differs between steps and decides how numbers are rounded.
    """
    exponents = [_exponent(matrix) for matrix in matrices]
    pairs = zip(matrices, exponents, strict=True)
    scaled = (matrix * 2.0**-exponent if exponent else matrix for matrix, exponent in pairs)
    numbers = [_padded(matrix.float().flatten()) for matrix in scaled]
    counts = tuple(len(some) // _GROUP for some in numbers)
    if missing := -sum(counts) % _TOGETHER:
        numbers.append(numbers[0].new_zeros(missing * _GROUP))
        counts = *counts, missing
    rows = (torch.cat(numbers) if len(numbers) > 1 else numbers[0]).view(-1, _GROUP)
    written, start, found = _encoded(rows, counts, turn), 0, list[Packed]()
    for matrix, count, exponent in zip(matrices, counts, exponents, strict=False):
        found.append(Packed(written, matrix.shape, start, exponent))
        start += count * _GROUP
    return found


def unpacked(packed_K: Iterable[Packed]) -> list[Tensor]:
    """Returns the matrices, and decodes each shared buffer once."""
    read: dict[int, Tensor] = {}
    found: list[Tensor] = []
    for one in packed_K:
        numbers = read.get(id(one.written))
        if numbers is None:
            numbers = read[id(one.written)] = _decoded(*one.written)
        found.append(one._cut(numbers))
    return found


def _exponent(matrix: Tensor) -> int:
    """Returns the exponent of the largest number if float32 would lose digits of it, else 0."""
    if matrix.dtype != torch.float64 or not matrix.numel():
        return 0
    exponent = math.frexp(matrix.abs().amax().item())[1]
    return 0 if abs(exponent) < _RANGE else max(-_MOST, min(exponent, _MOST))


def _encoded(rows: Tensor, counts: tuple[int, ...], turn: int) -> tuple[Tensor, Tensor]:
    """Rounds numbers to multiples of a step per row, right on average over the turns.

    No number is clipped. The rounding depends on the place and the turn alone: a repeated training
    gives the same bits, and what a place gains in every step adds up, however little.

    Returns:
        The lowest four bits of the multiples, two in a byte, and behind these the highest two, four
        in a byte; and the steps in bfloat16, (R, 1).
    """
    most = (_HALF - 1) * (1 - 2**-7)  # margin, because steps are rounded to bfloat16
    steps = (rows.abs().amax(dim=-1, keepdim=True) / most).to(torch.bfloat16)
    divisors = steps.float().masked_fill_(steps == 0, math.inf)
    draws = _draws(turn, rows.device).index_select(0, _rows_of(counts, rows.device))
    codes = draws.addcdiv_(rows, divisors).round_().to(torch.int8)
    words = codes.view(torch.int64).flatten()
    half, quarter = len(words) // 2, len(words) // 4
    low = (words[half:] & _LOW).bitwise_left_shift_(4).bitwise_or_(words[:half] & _LOW)
    high = (words >> 4).bitwise_and_(_HIGH)
    high = (high[half:] << 4).bitwise_or_(high[:half])
    high = (high[quarter:] << 2).bitwise_or_(high[:quarter])
    return torch.cat([low, high]).view(torch.uint8), steps


def _decoded(written: Tensor, steps: Tensor) -> Tensor:
    """Returns the numbers that `_encoded` wrote, in float32, 1-D."""
    words = written.view(torch.int64)
    half = _GROUP * len(steps) // 16
    low, high = words[:half], words[half:]
    high = torch.cat([high, high >> 2])
    high = torch.cat([high, high >> 4]).bitwise_and_(_HIGH).bitwise_left_shift_(4)
    codes = torch.cat([low, low >> 4]).bitwise_and_(_LOW).bitwise_or_(high)
    codes = codes.bitwise_xor_(_SIGN).view(torch.int8).sub_(_HALF)
    return (codes.view(-1, _GROUP).float() * steps.float()).flatten()


def _padded(numbers: Tensor) -> Tensor:
    missing = -len(numbers) % _GROUP
    return pad(numbers, (0, missing)) if missing else numbers


@lru_cache(maxsize=4)
def _draws(turn: int, device: torch.device) -> Tensor:
    """Returns (64, 64) numbers in [-1/2, 1/2), spread evenly over places and over the turns."""
    places = torch.arange(_GROUP * _GROUP, dtype=torch.int64)
    words = (places * _PLACES + turn * _TURNS) >> 16 & 0xFFFF
    return (words * 2.0**-16 - 0.5).view(_GROUP, _GROUP).to(device)


@lru_cache(maxsize=256)
def _rows_of(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the row of `_draws` for each row of all matrices, (R,), which have `counts` rows."""
    rows = torch.cat([torch.arange(count, dtype=torch.int32) for count in counts])
    return (rows % _GROUP).to(device)


@dataclass(frozen=True)
class Memory:
    """Memory of one slot.

    Attributes:
        q_GIR: Right singular directions that were found; left ones, (G, O, R), if `left` is set and
            `own` is not.
        residual: Unsent part, which is added to the gradient of the next step, if there is any:
            factors or a matrix, packed in few bits or not.
        columns: Number of columns, K, of the next step where the sites choose it together.
        left: True if the next sketch starts from the left side, where both sides take turns. Equal
            on all sites, as `columns` is.
        own: True if both sides take turns, and these directions are of this site alone: those of
            triplets, which were sent instead of a sketch.
    """

    q_GIR: Tensor
    residual: Gradient | Packed | None = None
    columns: int | None = None
    left: bool = False
    own: bool = False

    @property
    def right(self) -> Tensor | None:
        """Right directions, (G, I, R); None if it holds left ones."""
        return None if self.left and not self.own else self.q_GIR


def compacted(memory: Memory) -> Memory:
    """Copies the tensors of a memory that are views of larger ones."""
    return replace(memory, q_GIR=compact(memory.q_GIR), residual=compact(memory.residual))


def _taken_back(now: Memory | None, before: Memory | None) -> Memory | None:
    """Undoes the residual alone: sites have agreed on some of the start directions."""
    if now is None:
        return before
    return replace(now, residual=None if before is None else before.residual)


class Memories(ByPlace[Memory]):
    """Memories by place in the model.

    Args:
        packs: True if residuals that are matrices are kept in few bits.

    Attributes:
        turn: Number of applied steps, which makes rounding differ between steps.
    """

    def __init__(self, *, packs: bool = False) -> None:
        super().__init__(compacted, _taken_back)
        self.packs, self.turn = packs, 0

    def __setitem__(self, slot: Slot, memory: Memory) -> None:
        """Packs a residual at once, so that a step never holds all of them unpacked."""
        self.update({slot: memory})

    def update(self, memories: Mapping[Slot, Memory]) -> None:
        """Sets several memories; packs their matrices, small ones or a single one, in one piece."""
        whole = {s: m.residual for s, m in memories.items() if isinstance(m.residual, Tensor)}
        few_bits: dict[Slot, Packed] = {}
        if self.packs and whole:
            few_bits = dict(zip(whole, packed(list(whole.values()), self.turn), strict=True))
        for slot, memory in memories.items():
            kept = replace(memory, residual=few_bits[slot]) if slot in few_bits else memory
            super().__setitem__(slot, kept)

    def commit(self, *, applied: bool) -> None:
        """Applies the memories that the step has set, or discards them; counts applied steps."""
        super().commit(applied=applied)
        self.turn += applied

    def load(self, inheritance: Inheritance, start: StateDict) -> None:
        """Replaces all memories by those of `inherited`."""
        self.replace(inherited(inheritance, start))
        self.turn = inheritance.like["own"].get("turn", 0)


@overload
def compact(t: Tensor) -> Tensor: ...
@overload
def compact(t: Gradient | None) -> Gradient | None: ...
@overload
def compact(t: Gradient | Packed | None) -> Gradient | Packed | None: ...
def compact(t: Gradient | Packed | None) -> Gradient | Packed | None:
    """Lays tensors out as after saving and loading, so that products round alike."""
    if isinstance(t, Factors):
        return Factors(compact(t.d_GRO), compact(t.a_GRI))
    if t is None or isinstance(t, Packed):
        return t
    widths = [max(size, 1) for size in t.shape]
    plain = tuple(math.prod(widths[i + 1 :]) for i in range(len(widths)))
    if t.stride() == plain and t.untyped_storage().nbytes() == t.nbytes:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def residual_of(memory: Memory | None) -> Gradient | None:
    """Returns the unpacked residual of a memory; None if there is none."""
    residual = None if memory is None else memory.residual
    return residual.unpacked() if isinstance(residual, Packed) else residual


def residuals_of(memories: Sequence[Memory | None]) -> list[Gradient | None]:
    """Returns the unpacked residuals of several memories, and decodes each packed piece once."""
    found = [None if memory is None else memory.residual for memory in memories]
    whole = iter(unpacked(residual for residual in found if isinstance(residual, Packed)))
    return [next(whole) if isinstance(residual, Packed) else residual for residual in found]


def finite_or_none(factors: Factors) -> Factors | None:
    """Returns the factors if all numbers are finite, so that no infinities are remembered."""
    finite = factors.d_GRO.isfinite().all() & factors.a_GRI.isfinite().all()
    return factors if bool(finite) else None


def decoded(sent: Factors, codecs: Codecs) -> Factors:
    """Returns the rows as receivers decode them."""
    return Factors(received(codecs, sent.d_GRO), received(codecs, sent.a_GRI))


def encoded(sent_K: Sequence[Factors], codecs: Codecs) -> tuple[list[EncodedRows], list[Factors]]:
    """Returns the rows of several slots as they are encoded, and as receivers decode them."""
    rows = [t for sent in sent_K for t in (sent.d_GRO, sent.a_GRI)]
    written = encode_all(codecs, rows)
    arriving = decode_all(codecs, written, rows)
    pairs = zip(written[::2], written[1::2], strict=True)
    arrive_K = list(map(Factors, arriving[::2], arriving[1::2]))
    return [EncodedRows(*pair) for pair in pairs], arrive_K


def loss_of(sent: Factors, arrives: Factors) -> Factors:
    """Returns the product of what is sent minus that of what arrives, as factors of 2 R rows.

    They are `(D - D') A' + D (A - A')` for deltas D and activations A that arrive as D' and A':
    nothing large cancels in this product.
    """
    of_deltas = Factors(sent.d_GRO - arrives.d_GRO, arrives.a_GRI)
    return stack([of_deltas, Factors(sent.d_GRO, sent.a_GRI - arrives.a_GRI)])


def with_loss(
    residual: Factors | None, sent: Factors, arrives: Factors, rank: int
) -> Factors | None:
    """Returns the residual plus the loss of encoding, as `rank` triplets at most.

    Args:
        residual: Unsent part without the loss.
        sent: Rows before they are encoded.
        arrives: Rows after they are decoded.
        rank: Largest number of triplets.
    """
    lost = loss_of(sent, arrives)
    if finite_or_none(lost) is None:
        return residual
    kept = small_core(stack([lost] if residual is None else [residual, lost]), rank)
    return kept.factors() if kept.rank else None


def common_state(memories: Memories) -> StateDict:
    """Returns, by place, what is equal on all sites: columns of adaptive sketches, and the side."""
    held = {place_name(place): memory for place, memory in memories.held().items()}
    own = {name: True for name, memory in held.items() if memory.own}
    return {
        "columns": {name: m.columns for name, m in held.items() if m.columns is not None},
        "left": {name: True for name, memory in held.items() if memory.left},
        **({"own": own} if own else {}),
    }


def saved(memory: Memory) -> StateDict:
    """Returns the state of a memory: start directions and residual."""
    memory = compacted(memory)
    return {"start": memory.q_GIR, **saved_residual(compact(residual_of(memory)))}


def inherited(inheritance: Inheritance, start: StateDict) -> dict[Place, Memory]:
    """Returns the memories of a site that continues from saved states.

    Args:
        inheritance: Saved states, and what the site takes over of them.
        start: State that start directions are taken from.
    """
    common = inheritance.first["common"]
    columns, left, own = common["columns"], common.get("left", {}), common.get("own", {})
    starts = start["own"]["memories"]
    old = [state["own"]["memories"] for state in inheritance.residual]
    held: dict[Place, Memory] = {}
    for name in dict.fromkeys(name for memories in (starts, *old) for name in memories):
        parts = [memories[name] for memories in old if name in memories]
        residual = inherited_residual(parts, inheritance.weight)
        q_GIR = starts[name]["start"] if name in starts else parts[0]["start"][..., :0]
        is_left, is_own = (name in starts and name in told for told in (left, own))
        place = inheritance.place_of[name]
        held[place] = Memory(q_GIR, residual, columns.get(name), is_left, is_own)
    return held
