"""Detection of buffer writes that `Tensor._version` does not show.

`t.data.mul_()`, numpy views, operators in C++ that write through (PyTorch's fused observers of
quantization-aware training, its batch norm), custom kernels, `t.data = other` and `swap_tensors`
all leave the version as it is. So the values themselves are compared with a copy.

Small buffers are compared whole, all of one kind in two operations. Of each large one a sample is
compared in every step, and another 64 KiB of all large ones in turn. So a write to a whole buffer
is seen at once, a write to a small part of a large one a few steps later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

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

    @torch.no_grad()
    def note(self, tensors: Mapping[int, Tensor | None]) -> None:
        """Records the current values of some buffers; a buffer with None is not compared."""
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
        found = [k for group in self._groups.values() for k in group.changed(known)]
        return moved + found + self._large.changed(known)

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
