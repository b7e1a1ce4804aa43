"""Encoding of a site's uses of a block as bytes, and their decoding."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outergrad.core.blocks import SentRun, SentUse
from outergrad.core.coding import Codecs, Field, aligned, decode, encode
from outergrad.messages.raw import as_tensor
from outergrad.wire import Plain

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""Dtypes that can be sent; the index is the code."""
PREVIOUS = -1
"""Index in place of a tensor: the output of the previous use."""
_MOST_TEXT, _MOST_DEPTH, _MOST_DIMENSIONS, _MOST_ENTRIES = 1 << 24, 32, 16, 1 << 40
"""Limits of a received description: bytes, nesting depth, dimensions and elements of a tensor."""


class Shape(NamedTuple):
    """Sizes and dtype of a tensor that is not there yet."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(t: Tensor) -> Shape:
        """Returns the shape of a tensor."""
        return Shape(tuple(t.shape), t.dtype)

    def field(self, codecs: Codecs) -> Field:
        """Returns the wire format: floating tensors go through the codecs, others do not."""
        encoded = self.dtype.is_floating_point and 0 not in self.sizes and self.sizes
        return Field(self.sizes, self.dtype, codecs if encoded else ())


PlacedRun = Mapping[str, Any]
"""A `SentRun` with indices into the message's tensors in place of the tensors. "links": for each
use its member, the plain values for its replay, the indices of its tensors (`PREVIOUS` for the
output of the previous use), and the index of its fingerprint or None. "deltas": their indices."""


def sent_run(run: PlacedRun, tensors: Sequence[Tensor], scale: float = 1.0) -> SentRun:
    """Returns a run with its tensors; deltas are multiplied by `scale`, hence so are gradients."""
    links = [
        SentUse(
            member,
            about,
            [None if place == PREVIOUS else tensors[place] for place in places],
            None if mark is None else tensors[mark],
        )
        for member, about, places, mark in run["links"]
    ]
    return SentRun(links, [tensors[place] * scale for place in run["deltas"]])


class Message:
    """Runs of a site in one step, with the shapes of all their tensors.

    Args:
        runs: the runs.
        shapes: shapes of their tensors.
        codecs: encode the floating tensors.

    Attributes:
        nbytes: length of the message; 0 if there are no runs.
    """

    def __init__(self, runs: Sequence[PlacedRun], shapes: Sequence[Shape], codecs: Codecs) -> None:
        self.runs, self._fields = runs, [shape.field(codecs) for shape in shapes]
        tensors = [[DTYPES.index(shape.dtype), shape.sizes] for shape in shapes]
        described = {"runs": runs, "tensors": tensors}
        self._text = json.dumps(described, separators=(",", ":")).encode()
        self._start = aligned(8 + len(self._text))
        payload = sum(_nbytes(plain) for field in self._fields for plain in field.tensors())
        self.nbytes = self._start + payload if runs else 0

    def write(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        """Fills `out` (uint8) with the description and the tensors."""
        length = torch.tensor([len(self._text)]).view(torch.uint8)
        text = as_tensor(self._text)
        out[: 8 + len(text)] = torch.cat([length, text]).to(out.device)
        views = _views(out, self._start, self._fields)
        for field, parts, tensor in zip(self._fields, views, tensors, strict=True):
            for view, part in zip(parts, encode(field.codecs, tensor), strict=True):
                view.copy_(part)

    def decoded(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors as receivers will decode them."""
        pairs = zip(self._fields, tensors, strict=True)
        return [_decoded(field, encode(field.codecs, t)) for field, t in pairs]

    @staticmethod
    def read(data: Tensor, codecs: Codecs) -> tuple[list[PlacedRun], list[Tensor]]:
        """Returns a site's runs and their tensors, which are views where they were not encoded.

        Raises:
            ValueError: the data are not in the format of `write`.
        """
        length = int(data[:8].cpu().view(torch.int64)) if len(data) >= 8 else -1
        if not 0 <= length <= min(len(data) - 8, _MOST_TEXT):
            raise ValueError(f"a description of {length} bytes in a message of {len(data)}")
        runs, shapes = _told(data[8 : 8 + length].cpu().numpy().tobytes())
        fields, start = [shape.field(codecs) for shape in shapes], aligned(8 + length)
        needed = sum(_nbytes(plain) for field in fields for plain in field.tensors())
        if start + needed != len(data):
            raise ValueError(f"{start + needed} bytes are described in a message of {len(data)}")
        pairs = zip(fields, _views(data, start, fields), strict=True)
        return runs, [_decoded(field, views) for field, views in pairs]


def _decoded(field: Field, written: Sequence[Tensor]) -> Tensor:
    """Decodes to the dtype of the forward pass, in which the replay computes, too."""
    return decode(field.codecs, written, field.shape, field.dtype).to(field.dtype)


def _views(data: Tensor, start: int, fields: Sequence[Field]) -> list[list[Tensor]]:
    views: list[list[Tensor]] = []
    for field in fields:
        views.append([])
        for plain in field.tensors():
            stop = start + math.prod(plain.shape) * plain.dtype.itemsize
            views[-1].append(data[start:stop].view(plain.dtype).view(plain.shape))
            start += _nbytes(plain)
    return views


def _nbytes(plain: Plain) -> int:
    return aligned(math.prod(plain.shape) * plain.dtype.itemsize)


def _told(text: bytes) -> tuple[list[PlacedRun], list[Shape]]:
    try:
        told = json.loads(text)
        shapes = [told_shape(dtype, sizes) for dtype, sizes in told["tensors"]]
        for run in told["runs"]:
            _check(run, len(shapes))
        return told["runs"], shapes
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"its description cannot be read: {type(error).__name__}") from error


def told_shape(dtype: Any, sizes: Any) -> Shape:
    """Returns a tensor's shape, checked, from what another site sent.

    Raises:
        ValueError: there is no such tensor.
        TypeError: a value has the wrong type.
    """
    if len(sizes) > _MOST_DIMENSIONS:
        raise ValueError(f"{len(sizes)} dimensions")
    found = tuple(_whole(size, 0, _MOST_ENTRIES) for size in sizes)
    if math.prod(size or 1 for size in found) >= _MOST_ENTRIES:
        raise ValueError(f"a tensor of shape {found}")
    return Shape(found, DTYPES[_whole(dtype, 0, len(DTYPES))])


def _check(run: Any, tensors: int) -> None:
    """Raises if `run` is not a `PlacedRun` whose indices are below `tensors`."""
    for member, about, places, mark in run["links"]:
        _whole(member, 0, _MOST_ENTRIES)
        _check_depth(about)
        for place in places:
            _whole(place, PREVIOUS, tensors)
        if mark is not None:
            _whole(mark, 0, tensors)
    if not run["links"]:
        raise ValueError("a run of nothing")
    for place in run["deltas"]:
        _whole(place, 0, tensors)


def _whole(value: Any, least: int, below: int) -> int:
    if type(value) is not int or not least <= value < below:
        raise ValueError(f"{value!r} is no whole number from {least} to below {below}")
    return value


def _check_depth(value: Any, depth: int = 0) -> None:
    """Raises if containers are nested too deeply for recursive functions."""
    if depth > _MOST_DEPTH:
        raise ValueError("containers inside each other")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, depth + 1)
