"""What travels of a part of the model that is computed again: its uses, as bytes and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 16
_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
PREVIOUS = -1
"""In the place of a tensor: the output of the use before."""


class Shape(NamedTuple):
    """What is known of a tensor before it is there."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(t: Tensor) -> Shape:
        """Of a tensor."""
        return Shape(tuple(t.shape), t.dtype)

    @property
    def nbytes(self) -> int:
        """In a message."""
        return _aligned(torch.Size(self.sizes).numel() * self.dtype.itemsize)


@dataclass(frozen=True)
class Link:
    """One use of one module, in a run of uses of which each reads the output of the one before.

    Attributes:
        member: which of the block's modules.
        about: plain values that its replay needs.
        places: of each of its tensors among those of the message, or `PREVIOUS`.
    """

    member: int
    about: Any
    places: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """Uses that are computed again together.

    Attributes:
        links: in the order of forward.
        deltas: places of the deltas of the last one's outputs.
    """

    links: tuple[Link, ...]
    deltas: tuple[int, ...]


class Message:
    """The runs of a site in one step, with the shapes of all their tensors.

    Args:
        runs: the runs.
        shapes: of their tensors.

    Attributes:
        nbytes: its length; 0 if there are no runs.
    """

    def __init__(self, runs: Sequence[Run], shapes: Sequence[Shape]) -> None:
        self.runs, self._shapes = tuple(runs), tuple(shapes)
        self._text = _text(self.runs, self._shapes)
        self._start = _aligned(8 + len(self._text))
        payload = sum(shape.nbytes for shape in shapes)
        self.nbytes = self._start + payload if runs else 0

    def write(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        """Fills `out`, uint8, with the description and the tensors."""
        length = torch.tensor([len(self._text)]).view(torch.uint8)
        text = torch.frombuffer(bytearray(self._text), dtype=torch.uint8)
        out[: 8 + len(text)] = torch.cat([length, text]).to(out.device)
        for view, tensor in zip(_views(out, self._start, self._shapes), tensors, strict=True):
            view.copy_(tensor)

    @staticmethod
    def read(data: Tensor) -> tuple[tuple[Run, ...], list[Tensor]]:
        """The runs of a site, and views of their tensors."""
        length = int(data[:8].cpu().view(torch.int64))
        told = json.loads(bytes(data[8 : 8 + length].tolist()))
        shapes = [Shape(tuple(sizes), _DTYPES[dtype]) for dtype, sizes in told["tensors"]]
        runs = tuple(_run(run) for run in told["runs"])
        return runs, _views(data, _aligned(8 + length), shapes)


def _views(data: Tensor, start: int, shapes: Sequence[Shape]) -> list[Tensor]:
    views = []
    for shape in shapes:
        stop = start + torch.Size(shape.sizes).numel() * shape.dtype.itemsize
        views.append(data[start:stop].view(shape.dtype).view(shape.sizes))
        start += shape.nbytes
    return views


def _text(runs: Sequence[Run], shapes: Sequence[Shape]) -> bytes:
    told = {
        "runs": [
            {"links": [[x.member, x.about, x.places] for x in run.links], "deltas": run.deltas}
            for run in runs
        ],
        "tensors": [[_DTYPES.index(shape.dtype), shape.sizes] for shape in shapes],
    }
    return json.dumps(told, separators=(",", ":")).encode()


def _run(told: Any) -> Run:
    links = (Link(member, about, tuple(places)) for member, about, places in told["links"])
    return Run(tuple(links), tuple(told["deltas"]))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
