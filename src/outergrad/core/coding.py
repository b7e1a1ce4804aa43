"""Codecs one behind the other: what is written of a tensor of rows, and what is read of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from outergrad.wire import Codec, Plain

_ALIGNMENT = 16

Codecs = tuple[Codec, ...]
"""In the order in which a sender applies them; none for rows as they are."""

Wire = Codec | Sequence[Codec]
"""What a user may pass as `wire=`."""


class Field(NamedTuple):
    """One tensor of a message, and the codecs that it goes through."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    codecs: Codecs = ()

    def tensors(self) -> list[Plain]:
        """What it is written as."""
        return tensors(self.codecs, self.shape, self.dtype)


def stacked(wire: Wire, name: str = "wire") -> Codecs:
    """What was passed as `wire=`, or under another name, as codecs that can stand so in a row.

    Raises:
        ValueError: names what is no codec, or two that cannot stand so.
    """
    codecs = tuple(wire) if isinstance(wire, Sequence) else (wire,)
    strangers = [c for c in codecs if isinstance(c, type) or not isinstance(c, Codec)]
    if isinstance(wire, str) or strangers:
        raise ValueError(
            f"{name}={wire!r}; use codecs of og.wire, as og.wire.BF16(), or () for none"
        )
    for first, second in pairwise(codecs):
        if first.picks and not second.picks:
            continue
        kinds = type(first).__name__, type(second).__name__
        raise ValueError(f"{name}={codecs!r}; {_mistake(first, second).format(*kinds)}")
    return codecs


def _mistake(first: Codec, second: Codec) -> str:
    if first.picks:
        return "{0} and {1} both pick values: use one of them"
    if second.picks:
        return "{1} picks values as they are: put it before {0}"
    return "{0} and {1} each write values in a dtype of their own: use one of them"


def drops(codecs: Codecs) -> bool:
    """Whether small numbers may be lost as a whole, and the same ones in every step."""
    return any(codec.rounds_to is None for codec in codecs)


def without_drops(codecs: Codecs) -> Codecs:
    """Those that only round each number."""
    return tuple(codec for codec in codecs if codec.rounds_to is not None)


def sum_dtype(codecs: Codecs, dtype: torch.dtype) -> torch.dtype:
    """What sums over the sites are sent in, of numbers that are computed in a dtype."""
    assert not drops(codecs)
    return next((codec.rounds_to for codec in codecs if codec.rounds_to is not None), dtype)


def tensors(codecs: Codecs, shape: tuple[int, ...], dtype: torch.dtype) -> list[Plain]:
    """What a tensor is written as."""
    if not codecs:
        return [Plain(shape, dtype)]
    values, *others = codecs[0].tensors(shape, dtype)
    return [*tensors(codecs[1:], *values), *others]


def nbytes(codecs: Codecs, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    """Bytes of it, without what aligns it in a message."""
    return sum(math.prod(s) * d.itemsize for s, d in tensors(codecs, shape, dtype))


def encode(codecs: Codecs, rows: Tensor) -> list[Tensor]:
    """The tensors to write, each of its dtype or wider."""
    if not codecs:
        return [rows]
    values, *others = codecs[0].encode(rows)
    return [*encode(codecs[1:], values), *others]


def decode(
    codecs: Codecs, written: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """What was written of such a tensor: itself without codecs, in float32 at least with some."""
    if not codecs:
        return written[0]
    return _decoded(codecs, written, shape, dtype).to(torch.promote_types(dtype, torch.float32))


def _decoded(
    codecs: Codecs, written: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    if not codecs:
        return written[0]
    inner, *others = codecs[0].tensors(shape, dtype)
    count = len(written) - len(others)
    values = _decoded(codecs[1:], written[:count], *inner)
    return codecs[0].decode([values, *written[count:]], shape)


def received(codecs: Codecs, rows: Tensor) -> Tensor:
    """What the receivers decode of a tensor in float32 or float64."""
    return decode(codecs, encode(codecs, rows), tuple(rows.shape), rows.dtype)


def aligned(nbytes: int) -> int:
    """The next multiple of what every dtype can start at in a message."""
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
