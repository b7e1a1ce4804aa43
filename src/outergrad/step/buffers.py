"""Synchronisation of buffers that forward passes write to, such as running statistics.

Constant tables and masks cost nothing: every site says in its header which buffers were written to
since the last step. Those that some site wrote to travel, as bytes, in one message that goes with
the last gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from outergrad.messages.checksum import sum_of_bits
from outergrad.messages.header import Header
from outergrad.messages.raw import has_elements, overwrite

_MOST = 4096
"""Largest number of elements of a buffer that is compared whole."""
_SAMPLE = 256
"""Number of elements, roughly, that are compared of a larger buffer."""
_RUN_BYTES = 1 << 16
"""Bytes of large buffers that are summed in a step."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_AT_ONCE = 3
"""Comparisons on a device whose answer the host waits for; later ones are read one step later."""


class Contents:
    """Values that some buffers held when the sites agreed on them.

    Args:
        apart: for each buffer, whether it is compared apart from the others, because it is usually
            known to have been written to.
    """

    def __init__(self, apart: Sequence[bool]) -> None:
        self._apart = apart
        self._tensors: list[Tensor | None] = [None] * len(apart)
        self._addresses = [0] * len(apart)
        """Data pointers of the buffers that are compared; 0 for the others."""
        self._members: dict[int, tuple[_Group, _Member]] = {}
        self._groups: dict[tuple, _Group] = {}
        self._large = _LargeOnes()
        self._moved: set[int] = set()
        """Buffers found at another address, which stay changed until they are noted again."""

    @torch.no_grad()
    def note(self, tensors: Mapping[int, Tensor | None]) -> None:
        """Records the current values of some buffers; a buffer with None is not compared."""
        self._moved -= tensors.keys()
        for k, t in tensors.items():
            if t is not self._tensors[k] or self._has_moved(k):
                self._forget(k)
                self._look_at(k, t)
            else:
                self._large.forget(k)
        for group in self._groups.values():
            group.note(tensors.keys())

    @torch.no_grad()
    def changed(self, known: Sequence[bool]) -> list[int]:
        """Returns the buffers whose values have changed since `note`.

        Args:
            known: for each buffer, whether it is known to have been written to or replaced.
        """
        moved = [k for k in self._members if self._has_moved(k)]
        for k in moved:
            self._forget(k)
        self._moved.update(moved)
        found = [k for group in self._groups.values() for k in group.changed(known)]
        gone = [k for k in self._moved if not known[k]]
        return gone + found + self._large.changed(known)

    def _has_moved(self, k: int) -> bool:
        """True if the data pointer of a tensor has changed."""
        t, address = self._tensors[k], self._addresses[k]
        return address != 0 and t is not None and t.data_ptr() != address

    def _forget(self, k: int) -> None:
        self._tensors[k], self._addresses[k] = None, 0
        self._large.remove(k)
        if k in self._members:
            group, member = self._members.pop(k)
            group.remove(member)

    def _look_at(self, k: int, t: Tensor | None) -> None:
        self._tensors[k] = t
        if t is None or not _is_plain(t):
            return
        self._addresses[k] = t.data_ptr()
        seen = numbers = _numbers(t)
        if len(numbers) > _MOST:
            seen = numbers[:: len(numbers) // _SAMPLE]
            self._large.add(k, numbers)
        key = (numbers.device, numbers.dtype, self._apart[k])
        group = self._groups.setdefault(key, _Group())
        member = _Member(k, seen, seen.clone())
        group.add(member)
        self._members[k] = group, member


@dataclass(eq=False)
class _Member:
    """Elements of a buffer, or a sample of them.

    Attributes:
        place: index of the buffer.
        seen: view of its memory.
        kept: copy of what was there.
    """

    place: int
    seen: Tensor
    kept: Tensor


@dataclass
class _Group:
    """Buffers of one device and element width that are compared together."""

    members: list[_Member] = field(default_factory=list)
    _now: Tensor | None = None
    _kept: Tensor | None = None
    _looks: int = 0
    _answer: _Answer | None = None

    def note(self, places: Set[int]) -> None:
        taken = [m for m in self.members if m.place in places]
        if not taken:
            return
        self._lay_out()
        if len(taken) < len(self.members):
            for member in taken:
                member.kept.copy_(member.seen)
        else:
            torch.cat([m.seen for m in taken], out=self._kept)
        self._answer = None

    def _lay_out(self) -> None:
        """Joins the copies to one tensor, of which each member's copy becomes a view."""
        if self._kept is not None:
            return
        self._kept = torch.cat([m.kept for m in self.members])
        self._now = torch.empty_like(self._kept)
        lengths = [len(m.kept) for m in self.members]
        for member, part in zip(self.members, self._kept.split(lengths), strict=True):
            member.kept = part

    def add(self, member: _Member) -> None:
        self.members.append(member)
        self._kept = self._now = self._answer = None

    def remove(self, member: _Member) -> None:
        self.members.remove(member)
        self._kept = self._now = self._answer = None

    def changed(self, known: Sequence[bool]) -> list[int]:
        asked = [m for m in self.members if not known[m.place]]
        if not asked or not self._differs():
            return []
        return [m.place for m in asked if not torch.equal(m.seen, m.kept)]

    def _differs(self) -> bool:
        """True if some member holds other values; on a GPU, as of the step before.

        A host that waits for an answer at the start of backward would let the device run idle. So
        only the first answers are waited for.
        """
        if self._kept is None or self._now is None:
            return True  # a member was added or removed: each is compared by itself
        torch.cat([m.seen for m in self.members], out=self._now)
        self._looks += 1
        if self._now.device.type != "cuda" or self._looks <= _AT_ONCE:
            return not torch.equal(self._now, self._kept)
        before, self._answer = self._answer, _Answer((self._now != self._kept).any())
        return before is not None and before.read()


class _Answer:
    """A boolean of a GPU that is on its way to the host."""

    def __init__(self, flag: Tensor) -> None:
        self._flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._flag.copy_(flag, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def read(self) -> bool:
        """Waits for the copy, which should have arrived long ago."""
        self._event.synchronize()
        return bool(self._flag)


class _LargeOnes:
    """Sums over runs of large buffers, one of which is checked in each step."""

    def __init__(self) -> None:
        self._runs: dict[int, list[Tensor]] = {}
        self._turn: list[tuple[int, int]] = []
        self._sums: dict[tuple[int, int], int] = {}
        self._next = 0

    def add(self, k: int, numbers: Tensor) -> None:
        """Adds a buffer, but not one on a device, where the host would wait for each sum."""
        if numbers.device.type != "cpu":
            return
        self._runs[k] = list(numbers.split(_RUN_BYTES // numbers.dtype.itemsize))
        self._turn += [(k, j) for j in range(len(self._runs[k]))]
        self._sums.update({(k, j): _sum(run) for j, run in enumerate(self._runs[k])})

    def remove(self, k: int) -> None:
        if self._runs.pop(k, None) is not None:
            self.forget(k)
            self._turn = [one for one in self._turn if one[0] != k]

    def forget(self, k: int) -> None:
        """Drops the sums of a buffer that may rightly hold other values now."""
        if k in self._runs:
            self._sums = {one: total for one, total in self._sums.items() if one[0] != k}

    def changed(self, known: Sequence[bool]) -> list[int]:
        """Checks the next run; returns its buffer if the sum has changed."""
        if not self._turn:
            return []
        self._next = (self._next + 1) % len(self._turn)
        k, j = one = self._turn[self._next]
        if known[k]:
            return []
        now = _sum(self._runs[k][j])
        return [] if self._sums.setdefault(one, now) == now else [k]


def _sum(run: Tensor) -> int:
    return int(run.sum(dtype=torch.int64))


def _is_plain(t: Tensor) -> bool:
    """True if the elements of a tensor stand in its memory as they are."""
    plain = type(t) is Tensor and t.layout == torch.strided and t.device.type != "meta"
    return plain and not (t.is_quantized or t.is_conj() or t.is_neg()) and t.data_ptr() != 0


def _numbers(t: Tensor) -> Tensor:
    """Returns the memory from the first to the last element as integers, which also compare NaN.

    It goes by `t.data`, because autograd would know `t.detach()` as a view of t, and `swap_tensors`
    refuses a tensor that has views.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data.as_strided((span,), (1,)).view(_INTEGERS[t.dtype.itemsize])


Kind = Literal["broadcast", "mean", "local"]
KINDS: tuple[Kind, ...] = ("broadcast", "mean", "local")
_STATISTICS = ("running_mean", "running_var")
_COUNTER = "num_batches_tracked"


_Seen = tuple[Tensor | None, int]
"""A buffer and its mark at the time."""


@dataclass(frozen=True, eq=False)
class RegisteredBuffer:
    """Place where a buffer is registered, with the shape and dtype that sites agreed on."""

    name: str
    module: nn.Module
    key: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def registered(self) -> Tensor | None:
        """Tensor that is registered now."""
        registered = self.module._buffers
        if isinstance(registered, dict):
            return registered.get(self.key)
        return getattr(self.module, self.key, None)  # a module of TorchScript

    @property
    def tensor(self) -> Tensor | None:
        """Tensor that is registered now; None if its shape or dtype is another one."""
        t = self.registered
        fits = t is not None and (t.shape, t.dtype) == (self.shape, self.dtype)
        return t if fits else None

    @property
    def mark(self) -> int:
        """Number that changes when the buffer is written to: its version."""
        return _version(self.tensor)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.shape.numel() * self.dtype.itemsize


class FrozenParameter(RegisteredBuffer):
    """A parameter that is not trained but written to by the loop, as an average of others."""

    @property
    def registered(self) -> Tensor | None:
        """Tensor that is registered now."""
        return self.module._parameters.get(self.key)

    @property
    def mark(self) -> int:
        """Sum of its bits: averages are often written past the version, by `p.data.mul_()`."""
        t = self.tensor
        return 0 if t is None else sum_of_bits(t)


Values = Mapping[RegisteredBuffer, Tensor | None]
"""Agreed values of buffers; None if the sending site no longer has the buffer."""


class SharedBuffers:
    """Buffers of a model that are synchronised.

    A buffer replaced by a tensor of another shape or dtype is each site's own from then on.

    Args:
        model: the whole model, or None if nothing is shared.
        kind: how buffers are synchronised.
        local: names of buffers that each site keeps to itself.
        frozen: names of untrained parameters that are synchronised like buffers.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        kind: Kind = "local",
        local: Collection[str] = (),
        frozen: Collection[str] = (),
    ) -> None:
        self.kind: Kind = kind
        shares = model is not None and kind != "local"
        self._places = list(_places(model, local)) if shares and model is not None else []
        self._places += _frozen(model, frozen) if shares and model is not None else []
        self._number = {place: k for k, place in enumerate(self._places)}
        self._statistics = _statistics(self._places)
        counters = self._statistics.values()
        apart = [k in self._statistics or k in counters for k in range(len(self._places))]
        self._contents = Contents(apart)
        self._late: set[int] = set()
        """Indices of buffers on a GPU that were found to be written past their version."""
        self._seen: list[_Seen] = [(None, 0)] * len(self._places)
        self._pooled: dict[RegisteredBuffer, Tensor | None] | None = None
        self._note(self._places)

    @property
    def tensors(self) -> list[Tensor]:
        """All buffers whose shape and dtype are unchanged, in the order of the model."""
        return [t for t in self.by_name.values() if t is not None]

    @property
    def names(self) -> list[str]:
        """Names of all buffers and frozen parameters, in the order of the model."""
        return [place.name for place in self._places]

    @property
    def by_name(self) -> dict[str, Tensor | None]:
        """All buffers by name; None for one whose shape or dtype has changed."""
        buffers = [place for place in self._places if not isinstance(place, FrozenParameter)]
        return {place.name: place.tensor for place in buffers}

    def _note(self, places: Collection[RegisteredBuffer]) -> None:
        """Records the current values, which are the same on all sites."""
        tensors = {self._number[place]: place.tensor for place in places}
        for k, t in tensors.items():
            self._seen[k] = t, self._places[k].mark
        self._contents.note(tensors)

    def none_written(self) -> tuple[bool, ...]:
        """Returns the flags of a site that ran no forward."""
        return (False,) * len(self._places)

    def written(self) -> tuple[bool, ...]:
        """Returns for each buffer if it was written to since the sites agreed on it."""
        changed = self._by_version()
        for k in self._contents.changed(changed):
            changed[k] = True
            t = self._seen[k][0]
            if t is not None and t.device.type == "cuda":
                self._late.add(k)
        return tuple(changed)

    def _by_version(self) -> list[bool]:
        """Flags by versions; statistics go by the counter of PyTorch's norms, or by `training`."""
        changed = list(map(_changed, self._places, self._seen))
        for k, counter in self._statistics.items():
            trained = changed[counter] if counter is not None else self._places[k].module.training
            changed[k] = changed[k] or (trained and self._places[k].tensor is not None)
        for k in self._late:
            changed[k] = changed[k] or self._places[k].module.training
        return changed

    def pooled(self, values: Values) -> SharedBuffers:
        """Returns a copy for a site of several ranks, with the values that its ranks agreed on.

        They stand apart from the model until `take_pooled`, which is for a step that counts.
        """
        site = copy.copy(self)
        site._pooled = {}
        site.take(values)
        return site

    def take_pooled(self, site: SharedBuffers) -> None:
        """Writes the values of a copy made by `pooled` to the model."""
        if site._pooled:
            self.take(site._pooled)

    def value(self, place: RegisteredBuffer) -> Tensor | None:
        """Returns what is sent of a buffer."""
        return place.tensor if self._pooled is None else self._pooled.get(place, place.tensor)

    @torch.no_grad()
    def take(self, values: Values) -> None:
        """Writes agreed values; a buffer with None keeps its value."""
        if self._pooled is not None:
            self._pooled.update(
                {p: None if t is None else t.to(p.dtype) for p, t in values.items()}
            )
            return
        for place, value in values.items():
            _put(place, value)
        self._note(values)

    def named(self, values: Mapping[str, Tensor]) -> dict[RegisteredBuffer, Tensor | None]:
        """Maps values by name to buffers, leaving out unknown names and other shapes."""
        places = (place for place in self._places if place.name in values)
        return {p: t for p in places if (t := values[p.name]).shape == p.shape}

    def to_send(self, headers: Sequence[Header]) -> list[RegisteredBuffer]:
        """Returns the buffers that some site wrote to; the same on every site."""
        masks = zip(*(header.buffers for header in headers), strict=True)
        return [place for place, mask in zip(self._places, masks, strict=False) if any(mask)]


def _places(model: nn.Module, local: Collection[str]) -> Iterator[RegisteredBuffer]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, t in model.named_buffers():
        prefix, _, key = name.rpartition(".")
        if name not in local and has_elements(t) and t.numel():
            yield RegisteredBuffer(name, modules[prefix], key, t.shape, t.dtype)


def _frozen(model: nn.Module, names: Collection[str]) -> Iterator[RegisteredBuffer]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, p in model.named_parameters():
        prefix, _, key = name.rpartition(".")
        if name in names and p.numel():
            yield FrozenParameter(name, modules[prefix], key, p.shape, p.dtype)


def _statistics(places: Sequence[RegisteredBuffer]) -> dict[int, int | None]:
    """Maps running statistics, which PyTorch writes past their version, to their batch counter."""
    counters = {p.module: k for k, p in enumerate(places) if p.key == _COUNTER}
    found = (k for k, place in enumerate(places) if place.key in _STATISTICS)
    return {k: counters.get(places[k].module) for k in found}


def _changed(place: RegisteredBuffer, seen: _Seen) -> bool:
    before, mark = seen
    if before is not None and place.registered is before:
        return place.mark != mark
    return place.tensor is not None


def _version(t: Tensor | None) -> int:
    return 0 if t is None or t.is_inference() else t._version


def _put(place: RegisteredBuffer, value: Tensor | None) -> None:
    """Writes past the version, as PyTorch does with statistics: a graph may have saved them."""
    t = place.tensor
    if t is not None and value is not None:
        overwrite(t if t.is_inference() else t.data, value)
