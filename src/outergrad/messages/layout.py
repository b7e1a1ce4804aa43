"""Where the preamble, the gradients and the rows of slots stand in one message."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outergrad.core.coding import Field, aligned, decode, encode
from outergrad.core.errors import RefusedError
from outergrad.core.types import Factors, Slot
from outergrad.messages.wire import Piece


class Layout:
    """A message of a preamble, of whole gradients (the extras), and of the rows of slots.

    Extras of one dtype stand side by side, so that they can be added in one piece.

    Args:
        start: length of the preamble, bytes.
        extras: parameters, by name, whose gradients it holds whole.
        pieces: the rows.
        blobs: lengths of what is no rows.

    Attributes:
        nbytes: length of the message.
        blob_nbytes: lengths of what is no rows.
    """

    def __init__(
        self,
        start: int,
        extras: Mapping[str, nn.Parameter],
        pieces: Sequence[Piece],
        blobs: Sequence[int] = (),
    ) -> None:
        self.nbytes = start
        self.extras, self.pieces, self.blob_nbytes = extras, pieces, blobs
        dtypes = dict.fromkeys(p.dtype for p in extras.values())
        self._extras = [{n: p for n, p in extras.items() if p.dtype == d} for d in dtypes]
        self._flats = [
            self._spot((sum(p.numel() for p in members.values()),), dtype)
            for dtype, members in zip(dtypes, self._extras, strict=True)
        ]
        self._fields = [piece.fields() for piece in pieces]
        self._rows = [
            [[self._spot(*tensor) for tensor in field.tensors()] for field in fields]
            for fields in self._fields
        ]
        self._blobs = [self._spot((nbytes,), torch.uint8) for nbytes in blobs]

    def _spot(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Spot:
        """The place of the next tensor, behind those before it."""
        start = self.nbytes
        self.nbytes += aligned(math.prod(shape) * dtype.itemsize)
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return _Spot(shape, strides, start // dtype.itemsize, dtype)

    def flats(self, message: Tensor) -> list[Tensor]:
        """The extras, a flat view per dtype."""
        return [spot.view(message.view(spot.dtype)) for spot in self._flats]

    def by_name(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Views of such flat tensors, each extra in its own shape."""
        views: dict[str, Tensor] = {}
        for members, flat in zip(self._extras, flats, strict=True):
            parts = flat.split([p.numel() for p in members.values()])
            pairs = zip(members.items(), parts, strict=True)
            views.update({name: part.view(p.shape) for (name, p), part in pairs})
        return views

    def rows(self, message: Tensor) -> list[Rows | None]:
        """Views of the rows, to be filled or read; None where there are none."""
        dtypes = {spot.dtype for fields in self._rows for spots in fields for spot in spots}
        typed = {dtype: message.view(dtype) for dtype in dtypes}
        views = [
            [[spot.view(typed[spot.dtype]) for spot in spots] for spots in fields]
            for fields in self._rows
        ]
        pairs = zip(self._fields, views, strict=True)
        return [Rows(fields, written) if fields else None for fields, written in pairs]

    def factors(self, message: Tensor, site: int | None = None) -> list[Factors | None]:
        """What the rows hold: views of it where they are not encoded; None where there are none.

        Args:
            message: as it came.
            site: who sent it; None for this one, of which an error is its own.

        Raises:
            RefusedError: that of another site cannot be read.
            ValueError: this site's holds ids that no row of their table has.
        """
        try:
            found = [None if rows is None else rows.read() for rows in self.rows(message)]
            for piece, factors in zip(self.pieces, found, strict=True):
                if factors is not None and piece.slot.lookup:
                    _check_ids(piece.slot, factors.a_GRI)
            return found
        except Exception as error:  # codecs may be the user's, and raise what they like
            if site is None:
                raise
            what = f"a message of site {site} cannot be read: {error}"
            raise RefusedError(what, site) from error

    def blobs(self, message: Tensor) -> list[Tensor | None]:
        """Views of what is no rows; None where there is nothing."""
        views = (spot.view(message) for spot in self._blobs)
        return [view if len(view) else None for view in views]


def factors_of(
    layouts: Sequence[Layout], messages: Sequence[Tensor], rank: int
) -> list[list[Factors | None]]:
    """What the rows of every site's message hold, as `Layout.factors` says.

    Args:
        layouts: of the messages.
        messages: of every site.
        rank: this site.
    """
    triples = zip(range(len(layouts)), layouts, messages, strict=True)
    return [layout.factors(m, None if site == rank else site) for site, layout, m in triples]


def _check_ids(slot: Slot, ids_R: Tensor) -> None:
    lowest, highest = (int(t) for t in ids_R.aminmax())
    if lowest < 0 or highest >= slot.inputs:
        outside = lowest if lowest < 0 else highest
        raise ValueError(f"{slot.weight!r} has {slot.inputs} rows, and none of id {outside}")


class _Spot(NamedTuple):
    """A contiguous tensor within a message; `start` counts its own elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    dtype: torch.dtype

    def view(self, typed: Tensor) -> Tensor:
        """Of the message, seen as the dtype."""
        start = typed.storage_offset() + self.start
        return typed.as_strided(self.shape, self.strides, start)


class Rows:
    """The rows of one slot in a message, as views of it.

    Args:
        fields: the deltas, the activations or ids, and the bias gradient if it has one.
        written: the tensors that each of them is written as.
    """

    def __init__(self, fields: Sequence[Field], written: Sequence[Sequence[Tensor]]) -> None:
        self._fields, self._written = fields, written

    def fill(self, factors: Factors) -> None:
        """Writes factors into zeros; fewer rows than agreed leave some."""
        rows = factors.d_GRO.shape[1]
        for field, views, t in zip(self._fields, self._written, factors, strict=False):
            if t is not None:
                parts = encode(field.codecs, t) if field.codecs else [t]
                for view, part in zip(views, parts, strict=True):
                    _first(view, rows).copy_(part)

    def read(self) -> Factors:
        """What was written: views where it was not encoded."""
        pairs = zip(self._fields, self._written, strict=True)
        return Factors(
            *(
                decode(f.codecs, views, f.shape, f.dtype) if f.codecs else views[0]
                for f, views in pairs
            )
        )


def _first(view: Tensor, rows: int) -> Tensor:
    """The first rows of deltas, activations, (G, R, W), or ids, (R,); all of a bias gradient."""
    if view.dim() == 2:
        return view
    return view[:rows] if view.dim() == 1 else view[:, :rows]
