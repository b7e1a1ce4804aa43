"""Tensors of a layer, kept from its backward until its message starts, and checked for changes."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor, nn

from outergrad.capture.engine import NO_TASK, current_task
from outergrad.core.errors import OverwrittenError
from outergrad.core.protocols import Rule
from outergrad.core.types import Call, Factors

_WATCHED = 2
"""Number of a layer's backwards in which its tensors are compared with copies."""

_FEW = 1 << 20
"""Number of elements that are copied in these backwards however small the weight is."""


class Alarm:
    """Count of lost tensors in a model; each loss makes all layers compare with copies again."""

    def __init__(self) -> None:
        self.count = 0


class Keeper:
    """Keeps the tensors of a layer's uses from its own backward until its message starts.

    In between, other code may overwrite or free their memory: several backwards share a workspace,
    an in-place operation changes a delta that another branch has, too, or a hook frees activations.
    In the layer's first backwards, copies are made. They are compared with the tensors, value by
    value, when these are read. If a value differs, the copies are used, and copies are made for
    good. In later backwards only the version and the address of each tensor are compared, which
    costs nothing. They do not reveal writes through `.data` or pointers that begin later.

    Args:
        param: full name of a parameter of the layer.
        numel: number of elements of its weight. Tensors with more than twice as many, and more than
            2^20, are not copied before tensors of some layer of the model were lost.
        alarm: the model's count of lost tensors.
    """

    def __init__(self, param: str, numel: int, alarm: Alarm) -> None:
        self._param, self._most = param, max(2 * numel, _FEW)
        self._alarm, self._heard = alarm, alarm.count
        self.copies = False
        self._task, self._left = NO_TASK, _WATCHED

    def keep(self, tensors: Sequence[Tensor]) -> Kept:
        """Records the tensors as they are now, with copies where due."""
        if self._heard != self._alarm.count:
            self._heard, self._left, self._most = self._alarm.count, _WATCHED, inf
        if not (self.copies or self._left):
            return Kept(self, tensors, None)
        if self.copies:
            return Kept(self, _copied(tensors), None)
        self._count_backward()
        few = sum(t.numel() for t in tensors) <= self._most
        return Kept(self, tensors, _copied(tensors) if few else None)

    def lost(self) -> OverwrittenError:
        """Returns the error for changed tensors without copies; copies are made from now on."""
        self.copies = True
        self._alarm.count += 1
        return OverwrittenError(self._param)

    def _count_backward(self) -> None:
        task = current_task()
        if task != self._task:
            self._task = task
            self._left -= 1


class Kept:
    """Tensors with the values that they had in the backward of their layer.

    Args:
        keeper: the layer's keeper.
        tensors: autograd's tensors, or copies that nobody else has.
        copies: copies to compare with, if any.
    """

    __slots__ = ("_copies", "_keeper", "_marks", "_tensors")

    def __init__(
        self, keeper: Keeper, tensors: Sequence[Tensor], copies: Sequence[Tensor] | None
    ) -> None:
        self._keeper, self._tensors, self._copies = keeper, tensors, copies
        self._marks = _marks(tensors)

    def __call__(self) -> Sequence[Tensor]:
        """Returns the tensors, or their copies where the values have changed.

        Raises:
            OverwrittenError: the tensors were overwritten or freed, and there are no copies.
        """
        intact = self._marks == _marks(self._tensors)
        if self._copies is None:
            if intact:
                return self._tensors
            raise self._keeper.lost()
        if intact and all(map(_is_same, self._tensors, self._copies)):
            return self._tensors
        self._keeper.copies = True
        return self._copies

    def factors(self, rule: Rule, module: nn.Module, slot: int) -> Factors:
        """Returns the rows of one use of a layer, from its activations and delta kept here.

        Raises:
            OverwrittenError: as for a call.
        """
        return rule.factors(module, slot, Call(*self()))


def _marks(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    if len(tensors) == 2:  # of a product: without a loop, as it is called for every layer
        a, d = tensors
        return a._version, d._version, a.data_ptr(), d.data_ptr()
    return *(t._version for t in tensors), *(t.data_ptr() for t in tensors)


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def _is_same(t: Tensor, copy: Tensor) -> bool:
    """True if all values are equal, NaN to NaN."""
    if torch.equal(t, copy):
        return True
    return bool(((t == copy) | ((t != t) & (copy != copy))).all())
