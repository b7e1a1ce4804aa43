"""Layout of one message: the positions of its preamble, whole gradients and payloads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outergrad.core.coding import (
    Codecs,
    Encoded,
    Field,
    aligned,
    decode,
    decode_all,
    encode,
    refuse_out_of_range,
)
from outergrad.core.errors import RefusedError
from outergrad.core.payload import Arrived, Payload
from outergrad.core.types import Source
from outergrad.messages.wire import Piece

_LARGE = 1 << 16
"""Size of a field above which it is decoded alone: a copy would take longer than a call."""


class Layout:
    """Layout of a message: a preamble, whole gradients (the extras), and payloads.

    Extras of one dtype are contiguous, so that they can be added in one call.

    Args:
        start: length of the preamble, bytes.
        extras: parameters, by name, whose gradients the message holds whole.
        pieces: its payloads.

    Attributes:
        nbytes: length of the message.
    """

    def __init__(
        self,
        start: int,
        extras: Mapping[str, nn.Parameter],
        pieces: Sequence[Piece],
    ) -> None:
        self.nbytes = start
        self.extras, self.pieces = extras, pieces
        dtypes = dict.fromkeys(p.dtype for p in extras.values())
        self._extras = [{n: p for n, p in extras.items() if p.dtype == d} for d in dtypes]
        self._flats = [
            self._spot((sum(p.numel() for p in members.values()),), dtype)
            for dtype, members in zip(dtypes, self._extras, strict=True)
        ]
        self._fields = [piece.fields() for piece in pieces]
        written = [[field.tensors() for field in fields] for fields in self._fields]
        self._counts = [[len(tensors) for tensors in fields] for fields in written]
        self._spots = [self._spot(*t) for fields in written for tensors in fields for t in tensors]
        self._dtypes = {spot.dtype for spot in self._spots}
        self._all_fields = [field for fields in self._fields for field in fields]
        self._together = _together(self._all_fields)
        self._forms = [(piece.slot, piece.rows, piece.form) for piece in pieces]
        self._sizes = [len(fields) for fields in self._fields]

    def _spot(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Spot:
        """Reserves the position of the next tensor, behind those before it."""
        start = self.nbytes
        self.nbytes += aligned(math.prod(shape) * dtype.itemsize)
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return _Spot(shape, strides, start // dtype.itemsize, dtype)

    def flats(self, message: Tensor) -> list[Tensor]:
        """Returns the extras of a message, as one flat view per dtype."""
        return [spot.view(message.view(spot.dtype)) for spot in self._flats]

    def by_name(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns views of flat tensors like those of `flats`, each extra in its own shape."""
        views: dict[str, Tensor] = {}
        for members, flat in zip(self._extras, flats, strict=True):
            parts = flat.split_with_sizes([p.numel() for p in members.values()])
            pairs = zip(members.items(), parts, strict=True)
            views.update({name: part.view(p.shape) for (name, p), part in pairs})
        return views

    def views(self, message: Tensor) -> list[PieceView | None]:
        """Returns views of each payload, to be filled or read; None where a piece has no rows."""
        tensors = iter(self._tensors(message))
        triples = zip(self.pieces, self._fields, self._counts, strict=True)
        return [
            PieceView(piece, fields, [list(islice(tensors, n)) for n in counts]) if fields else None
            for piece, fields, counts in triples
        ]

    def _tensors(self, message: Tensor) -> list[Tensor]:
        """Returns views of all tensors of the payloads."""
        typed = {dtype: message.view(dtype) for dtype in self._dtypes}
        start = {dtype: t.storage_offset() for dtype, t in typed.items()}
        return [  # inlines `_Spot.view`: a call for each tensor is slower
            typed[dtype].as_strided(shape, strides, start[dtype] + offset)
            for shape, strides, offset, dtype in self._spots
        ]

    def filled(self, message: Tensor, kind: type[Source]) -> list[tuple[Piece, PieceView]]:
        """Returns the non-empty payloads of slots, or of blocks, with their views in a message."""
        pairs = zip(self.pieces, self.views(message), strict=True)
        return [(p, view) for p, view in pairs if view is not None and isinstance(p.slot, kind)]

    def gradients(self, message: Tensor, site: int | None = None) -> list[Arrived | None]:
        """Reads the payloads: views of the message where not encoded; None where there is nothing.

        Args:
            message: as received.
            site: the sender; None for this site, whose errors are its own.

        Raises:
            RefusedError: another site's message cannot be read.
            ValueError: this site's message holds ids outside their table.
        """
        try:
            return self._read(message)
        except Exception as error:  # codecs and forms may be the user's, and raise what they like
            if site is None:
                raise
            raise RefusedError(f"a message cannot be read: {error}", site) from error

    def _read(self, message: Tensor) -> list[Arrived | None]:
        """Reads each payload; small fields with the same codecs are decoded together."""
        found = self._tensors(message)
        if self._together:
            found = self._decoded(found)
        arrived, start = list[Arrived | None](), 0
        for (slot, rows, form), size in zip(self._forms, self._sizes, strict=True):
            arrived.append(form.read(found[start : start + size], slot, rows) if size else None)
            start += size
        return arrived

    def _decoded(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns one tensor per field, from all those that the fields are written as."""
        left = iter(tensors)
        written = [list(islice(left, n)) for counts in self._counts for n in counts]
        found = [of_field[0] for of_field in written]
        for codecs, places in self._together:
            encoded_K = [Encoded(written[k]) for k in places]
            rows_K = decode_all(codecs, encoded_K, [self._all_fields[k] for k in places])
            for k, rows in zip(places, rows_K, strict=True):
                found[k] = rows
        return found


def _together(fields: Sequence[Field]) -> list[tuple[Codecs, list[int]]]:
    """Indices of encoded fields, grouped by codecs; a large field is alone, to save its copy."""
    found: dict[object, tuple[Codecs, list[int]]] = {}
    for k, field in enumerate(fields):
        if field.codecs:
            is_large = math.prod(field.shape) > _LARGE
            _, places = found.setdefault(k if is_large else field.codecs, (field.codecs, []))
            places.append(k)
    return list(found.values())


def gradients_of(
    layouts: Sequence[Layout], messages: Sequence[Tensor], rank: int
) -> list[list[Arrived | None]]:
    """Reads every site's message with `Layout.gradients`.

    Args:
        layouts: of the messages.
        messages: of every site.
        rank: this site.
    """
    triples = zip(range(len(layouts)), layouts, messages, strict=True)
    return [layout.gradients(m, None if site == rank else site) for site, layout, m in triples]


class _Spot(NamedTuple):
    """Position of a contiguous tensor within a message; `start` counts elements of its dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    dtype: torch.dtype

    def view(self, typed: Tensor) -> Tensor:
        start = typed.storage_offset() + self.start
        return typed.as_strided(self.shape, self.strides, start)


class PieceView:
    """One payload of a message, as views of it.

    Args:
        piece: description of the payload.
        fields: of the piece.
        written: per field, views of the tensors that it is written as.

    Attributes:
        written: as above.
    """

    def __init__(
        self, piece: Piece, fields: Sequence[Field], written: Sequence[Sequence[Tensor]]
    ) -> None:
        self._piece, self._fields, self.written = piece, fields, written

    def fill(self, payload: Payload) -> None:
        """Writes a payload into zeros; one of fewer rows than agreed leaves zeros behind it."""
        for field, views, t in zip(self._fields, self.written, payload, strict=False):
            if t is None:
                continue
            parts = [t] if not field.codecs and isinstance(t, Tensor) else _parts(field, t)
            for view, part in zip(views, parts, strict=True):
                whole = view.shape == part.shape
                (view if whole else view[tuple(map(slice, part.shape))]).copy_(part)

    def read(self) -> Arrived:
        """Returns the payload's gradient; it consists of views where it was not encoded."""
        pairs = zip(self._fields, self.written, strict=True)
        tensors = [decode(f.codecs, views, f.shape, f.dtype) for f, views in pairs]
        return self._piece.form.read(tensors, self._piece.slot, self._piece.rows)


def _parts(field: Field, t: Tensor | Encoded) -> Sequence[Tensor]:
    if isinstance(t, Encoded):
        return t.written
    refuse_out_of_range(field.codecs, t)
    return encode(field.codecs, t)
