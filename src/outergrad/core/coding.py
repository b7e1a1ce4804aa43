"""Chains of codecs: encodes and decodes tensors of rows through several codecs in sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from outergrad.wire import Codec, Plain

_ALIGNMENT = 16

Codecs = tuple[Codec, ...]
"""Codecs in the order in which a sender applies them; an empty tuple leaves rows unchanged."""

Wire = Codec | Sequence[Codec]
"""Values that a user may pass as `wire=`."""


class Field(NamedTuple):
    """Shape and dtype of one tensor of a message, and the codecs that it is encoded with."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    codecs: Codecs = ()

    def tensors(self) -> list[Plain]:
        """Shapes and dtypes of the tensors that it is written as."""
        return tensors(self.codecs, self.shape, self.dtype)


def stacked(wire: Wire, name: str = "wire") -> Codecs:
    """Returns the value of `wire=`, or of the named parameter, as a chain of codecs.

    Raises:
        ValueError: names an entry that is no codec, or two that cannot follow each other.
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
    """True if a codec may drop small numbers altogether, at the same places in every step."""
    return any(codec.rounds_to is None for codec in codecs)


def without_drops(codecs: Codecs) -> Codecs:
    """Returns the codecs that only round each number."""
    return tuple(codec for codec in codecs if codec.rounds_to is not None)


def sum_dtype(codecs: Codecs, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which sums over the sites are sent, for numbers of the given dtype."""
    assert not drops(codecs)
    return next((codec.rounds_to for codec in codecs if codec.rounds_to is not None), dtype)


def tensors(codecs: Codecs, shape: tuple[int, ...], dtype: torch.dtype) -> list[Plain]:
    """Returns shapes and dtypes of the tensors that a tensor is written as."""
    if not codecs:
        return [Plain(shape, dtype)]
    values, *others = codecs[0].tensors(shape, dtype)
    return [*tensors(codecs[1:], *values), *others]


def nbytes(codecs: Codecs, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    """Encoded size of a tensor in bytes, without alignment padding."""
    return sum(math.prod(s) * d.itemsize for s, d in tensors(codecs, shape, dtype))


def encode(codecs: Codecs, rows: Tensor) -> list[Tensor]:
    """Encodes rows; each returned tensor has its wire dtype or a wider one."""
    if not codecs:
        return [rows]
    values, *others = codecs[0].encode(rows)
    return [*encode(codecs[1:], values), *others]


def refuse_out_of_range(codecs: Codecs, rows: Tensor) -> None:
    """Raises if float64 numbers would be lost: codecs cover at most the range of float32.

    Raises:
        ValueError: all numbers are too small, or some are too large.
    """
    if not codecs or rows.dtype != torch.float64:
        return
    peak, known = rows.abs().amax().item() if rows.numel() else 0.0, torch.finfo(torch.bfloat16)
    if peak and math.isfinite(peak) and not known.tiny * 256 <= peak <= known.max / 2:
        raise ValueError(
            f"wire={codecs!r} writes numbers in the range of float32, and the largest of these "
            f"float64 numbers is {peak:.1e}: scale the loss, or pass no codecs"
        )


def decode(
    codecs: Codecs, written: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Decodes a tensor of this shape and dtype, with codecs to at least float32."""
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
    """The encoded tensors of one tensor of rows."""

    written: Sequence[Tensor]


class Shaped(Protocol):
    """A tensor of rows, or the `Field` that describes it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        ...


def encode_all(codecs: Codecs, rows_K: Sequence[Tensor]) -> list[Encoded]:
    """Encodes several tensors like `encode`; tensors with rows of one kind are encoded together.

    Raises:
        ValueError: float64 numbers are outside the range of the codecs.
    """
    for rows in rows_K:
        refuse_out_of_range(codecs, rows)
    found: list[Encoded | None] = [None] * len(rows_K)
    for width, places in _alike(codecs, rows_K):
        members = [rows_K[k] for k in places]
        counts = _counts(members, width)
        tensors_T = [_apart(t, counts, members) for t in encode(codecs, _joined(members, counts))]
        for k, *written in zip(places, *tensors_T, strict=True):
            found[k] = Encoded(written)
    return cast(list[Encoded], found)


def decode_all(
    codecs: Codecs, encoded_K: Sequence[Encoded], rows_K: Sequence[Shaped]
) -> list[Tensor]:
    """Decodes several tensors as the receivers do; tensors with rows of one kind share one call.

    Args:
        codecs: that the tensors were encoded with.
        encoded_K: the result of `encode_all`.
        rows_K: the tensors given to `encode_all`, or their fields.
    """
    found: list[Tensor | None] = [None] * len(rows_K)
    for width, places in _alike(codecs, rows_K):
        members, first = [rows_K[k] for k in places], rows_K[places[0]]
        counts = _counts(members, width)
        tensors_T = zip(*(encoded_K[k].written for k in places), strict=True)
        shape = (1, sum(counts), width) if counts else tuple(first.shape)
        written = [_joined(parts, counts) for parts in tensors_T]
        rows = decode(codecs, written, shape, first.dtype)
        for k, part in zip(places, _apart(rows, counts, members), strict=True):
            found[k] = part
    return cast(list[Tensor], found)


def _alike(codecs: Codecs, rows_K: Sequence[Shaped]) -> list[tuple[int, list[int]]]:
    """Groups tensors that can be concatenated: row width and indices; width 0 for one alone."""
    groups: dict[tuple[int, object], list[int]] = {}
    for k, rows in enumerate(rows_K):
        width = _width(codecs, tuple(rows.shape), rows.dtype)
        groups.setdefault((width, rows.dtype if width else k), []).append(k)
    return [(width, places) for (width, _), places in groups.items()]


def _counts(members: Sequence[Shaped], width: int) -> list[int]:
    """Number of rows of the given width in each tensor; empty for a tensor alone."""
    return [math.prod(rows.shape) // width for rows in members] if width else []


@lru_cache(maxsize=1024)
def _width(codecs: Codecs, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Width of the pieces that the codecs encode independently; 0 if rows depend on each other."""
    written = tensors(codecs, shape, dtype)
    if not math.prod(shape) or any(plain.shape[:-1] != shape[:-1] for plain in written):
        return 0
    group = getattr(codecs[0], "group", None) if len(codecs) == 1 else None
    return group if group and shape[-1] % group == 0 else shape[-1]


def _joined(parts: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Concatenates the tensors to (1, R, W); without counts returns the only tensor unchanged."""
    if not counts:
        return parts[0]
    if len(parts) == 1:
        return parts[0].reshape(1, counts[0], -1)
    return torch.cat([t.reshape(count, -1) for t, count in zip(parts, counts, strict=True)])[None]


def _apart(t: Tensor, counts: Sequence[int], like: Sequence[Shaped]) -> list[Tensor]:
    """The inverse of `_joined`: views in the shapes of `like`, but for the last dimension."""
    if not counts:
        return [t]
    pairs = zip(t[0].split(counts), like, strict=True)
    return [part.reshape(*rows.shape[:-1], -1) for part, rows in pairs]


def received(codecs: Codecs, rows: Tensor) -> Tensor:
    """Encodes and decodes a float32 or float64 tensor: the values that the receivers get."""
    return decode(codecs, encode(codecs, rows), tuple(rows.shape), rows.dtype)


def aligned(nbytes: int) -> int:
    """Rounds a size in bytes up so that the next tensor may have any dtype."""
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
