"""Uses of a block: how they follow each other, and their encoding as bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from outergrad.capture.engine import NO_TASK, current_task, will_run
from outergrad.capture.kept import Kept
from outergrad.capture.node_ref import NodeRef
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
        for one, parts, tensor in zip(self._fields, views, tensors, strict=True):
            for view, part in zip(parts, encode(one.codecs, tensor), strict=True):
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
    for one in fields:
        views.append([])
        for plain in one.tensors():
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


@dataclass(eq=False)
class Use:
    """One call of a block's module in the forward pass.

    Attributes:
        member: index of the module in the block.
        about: plain values that the replay needs.
        shapes: shapes of the tensors it reads.
        constants: tensors without a gradient, by index, each with its version.
        outputs: shapes of the floating outputs.
        marks: fingerprint of the outputs, if one is sent.
        entry: index of the tensor that is the only output of the previous use; None if none is.
        previous: the use that returned the entry.
        linked: True if no other reader of that output is known, so that its delta follows by
            replay.
        followers: nodes of the uses whose `previous` is this one.
        node: autograd node that runs when the deltas are there.
        kept: tensors it read, from when the deltas have arrived.
        deltas: deltas of the floating outputs.
        entry_delta: gradient of the entry that comes from this use.
        memory: guard of `kept` and `deltas` against overwriting, until they are read.
        is_nothing: True if no output got a gradient; the deltas are then zeros.
    """

    member: int
    about: Any
    shapes: list[Shape]
    constants: dict[int, tuple[Tensor, int]]
    outputs: list[Shape]
    marks: tuple[Tensor, ...] = ()
    entry: int | None = None
    previous: Use | None = None
    linked: bool = False
    followers: list[NodeRef] = field(default_factory=list)
    node: NodeRef | None = None
    kept: list[Tensor] = field(default_factory=list)
    deltas: Sequence[Tensor] = ()
    entry_delta: Tensor | None = None
    memory: Kept | None = None
    is_nothing: bool = False

    def defined(self, deltas: Sequence[Tensor | None], device: torch.device) -> list[Tensor]:
        """Returns one delta per floating output, with zeros where autograd has none."""
        self.is_nothing = all(delta is None for delta in deltas)
        return [
            torch.zeros(shape.sizes, dtype=shape.dtype, device=device) if delta is None else delta
            for delta, shape in zip(deltas, self.outputs, strict=True)
        ]

    def runs(self) -> bool:
        """True if the current backward pass reaches this use."""
        return will_run(self.node and self.node())

    def tensors(self, read: Sequence[Tensor]) -> list[Tensor]:
        """Returns all tensors the use read: `read`, with the constants inserted by index."""
        rest = iter(read)
        kept = [self.constants.get(k) for k in range(len(self.shapes))]
        return [next(rest) if constant is None else constant[0] for constant in kept]

    def release(self) -> None:
        """Drops the tensors after the step: a loss that is kept may keep the graph alive."""
        self.kept, self.deltas, self.entry_delta, self.memory = [], (), None, None

    def read(self) -> None:
        """Restores the tensors and deltas to their values at the time the deltas arrived.

        Raises:
            OverwrittenError: they have been written to or freed since.
        """
        if self.memory is not None:
            tensors, count = self.memory(), len(self.kept)
            self.kept, self.deltas = list(tensors[:count]), tensors[count:]

    @property
    def as_sent(self) -> SentUse:
        """This use in the form in which a receiver gets it."""
        return SentUse(self.member, self.about, self.kept, *self.marks)


class _Latest(NamedTuple):
    """The only output of the last use. A changed version tells of an in-place operation since."""

    output: ref[Tensor]
    version: int
    use: NodeRef


def use_of(node: NodeRef) -> Use | None:
    """Returns the use that belongs to an autograd node; None once its graph is gone."""
    found = node()
    return None if found is None else found.use


class Following:
    """Learns which uses of a block's modules are the only reader of the previous use's output.

    Args:
        names: full names of the modules.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._latest: _Latest | None = None
        self._sole: dict[tuple[int, int], bool] = {}

    def note(self, use: Use, outputs: Sequence[Tensor]) -> None:
        """Remembers the only output of a use, as a possible input of the next one."""
        assert use.node is not None
        only = outputs[0] if len(outputs) == 1 else None
        self._latest = None if only is None else _Latest(ref(only), only._version, use.node)

    def entry(self, args: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
        """Returns the argument that is the last use's output, and a view to pass in its place.

        The gradient of the view comes from this use alone. An output changed in place since does
        not count: a sum passes its delta on unchanged, so the two could not be told apart.
        """
        latest = self._latest and self._latest.output()
        if latest is None or current_task() != NO_TASK or not any(a is latest for a in args):
            return None
        assert self._latest is not None
        return None if latest._version != self._latest.version else (latest, latest.view_as(latest))

    def link(self, use: Use, seen: Tensor, place: int) -> None:
        """Links a use to the previous one, whose output it reads as the view `seen`.

        Args:
            use: the reader.
            seen: the view that `entry` returned.
            place: index of the view among the tensors of `use`.
        """
        assert self._latest is not None
        assert use.node is not None
        previous, node = use_of(self._latest.use), use.node
        if previous is None:
            return
        use.entry, use.previous = place, previous
        use.linked = self._sole.get((previous.member, use.member), False)
        previous.followers.append(node)

        def keep(delta: Tensor) -> None:
            here = use_of(node)
            if here is not None:
                here.entry_delta = delta

        seen.register_hook(keep)

    def forget(self, use: Use) -> None:
        """Drops the entry deltas of a backward pass that does not share the deltas of `use`."""
        for follower in map(use_of, use.followers):
            if follower is not None:
                follower.entry_delta = None

    def check(self, use: Use) -> None:
        """Learns whether the delta of the only output came from one follower alone.

        Raises:
            RuntimeError: a follower was sent as the only reader, and is not.
        """
        followers = [f for f in map(use_of, use.followers) if f is not None]
        ran = [follower for follower in followers if follower.entry_delta is not None]
        for follower in ran:
            sole = len(ran) == 1 and _is_same(use.deltas[0], follower.entry_delta)
            pair = use.member, follower.member
            if use.deltas[0].numel():  # without rows there is nothing to learn
                self._sole[pair] = sole and self._sole.get(pair, True)
            follower.entry_delta = None
            if follower.linked and not sole:
                raise RuntimeError(
                    f"the output of block {self._names[use.member]!r} was read by "
                    f"{self._names[follower.member]!r} alone in the steps before, and is used "
                    f"elsewhere, too, in this one: call optimizer.zero_grad() and go on, both "
                    f"will be sent from now on"
                )


def _is_same(delta: Tensor, other: Tensor | None) -> bool:
    """True if autograd added nothing: a sum has new memory, as long as `other` lives."""
    return other is not None and delta.data_ptr() == other.data_ptr()
