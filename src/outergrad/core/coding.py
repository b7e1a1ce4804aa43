"""Codecs one behind the other: what is written of a tensor of rows, and what is read of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, cast

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


class Encoded(NamedTuple):
    """What codecs have written of a tensor of rows."""

    written: list[Tensor]


def encode_all(codecs: Codecs, rows_K: Sequence[Tensor]) -> list[Encoded]:
    """What `encode` gives of each tensor: rows of one width are encoded in one go."""
    found: list[Encoded | None] = [None] * len(rows_K)
    for places in _alike(codecs, [(tuple(rows.shape), rows.dtype) for rows in rows_K]):
        members = [rows_K[k] for k in places]
        joined = _joined(members) if len(places) > 1 else members[0]
        tensors_T = [_apart(t, members) for t in encode(codecs, joined)]
        for k, *written in zip(places, *tensors_T, strict=True):
            found[k] = Encoded(written)
    return cast(list[Encoded], found)


def decode_all(
    codecs: Codecs, encoded_K: Sequence[Encoded], rows_K: Sequence[Tensor]
) -> list[Tensor]:
    """What the receivers decode of each tensor.

    Args:
        codecs: that they went through.
        encoded_K: what `encode_all` gave.
        rows_K: what it was given.
    """
    found: list[Tensor | None] = [None] * len(rows_K)
    for places in _alike(codecs, [(tuple(rows.shape), rows.dtype) for rows in rows_K]):
        members, first = [rows_K[k] for k in places], rows_K[places[0]]
        tensors_T = zip(*(encoded_K[k].written for k in places), strict=True)
        joined = [_joined(parts) if len(places) > 1 else parts[0] for parts in tensors_T]
        count = sum(math.prod(rows.shape[:-1]) for rows in members)
        shape = (1, count, first.shape[-1]) if len(places) > 1 else tuple(first.shape)
        rows = decode(codecs, joined, shape, first.dtype)
        for k, part in zip(places, _apart(rows, members), strict=True):
            found[k] = part
    return cast(list[Tensor], found)


def _alike(codecs: Codecs, kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[list[int]]:
    """Places of the tensors whose rows may stand below each other; others alone."""
    groups: dict[object, list[int]] = {}
    for k, (shape, dtype) in enumerate(kinds):
        written = tensors(codecs, shape, dtype)
        by_row = all(plain.shape[:-1] == shape[:-1] for plain in written)
        groups.setdefault((shape[-1], dtype) if by_row else k, []).append(k)
    return list(groups.values())


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all, (1, R, W)."""
    return torch.cat([part.flatten(0, -2) for part in parts])[None]


def _apart(t: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The rows of each again, as views."""
    if len(like) == 1:
        return [t]
    counts = [math.prod(rows.shape[:-1]) for rows in like]
    pairs = zip(t[0].split(counts), like, strict=True)
    return [part.unflatten(0, rows.shape[:-1]) for part, rows in pairs]


def received(codecs: Codecs, rows: Tensor) -> Tensor:
    """What the receivers decode of a tensor in float32 or float64."""
    return decode(codecs, encode(codecs, rows), tuple(rows.shape), rows.dtype)


def aligned(nbytes: int) -> int:
    """The next multiple of what every dtype can start at in a message."""
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
