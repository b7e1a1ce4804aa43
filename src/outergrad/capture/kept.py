"""Tensors of a layer that are read after its own backward, when its message starts."""

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
"""Backwards of a layer in which copies are compared with what they are of."""

_FEW = 1 << 20
"""Elements of which copies are kept in these, however small the weight is."""


class Alarm:
    """Counts how often tensors of some layer of a model were lost: then all layers are watched."""

    def __init__(self) -> None:
        self.count = 0


class Keeper:
    """Keeps the tensors of a layer's uses from its own backward until its message starts.

    In between, somebody else may write to their memory or free it: a workspace that several
    backwards share, an in-place operation on a delta that another branch has, too, a hook that
    frees activations. In the first backwards of the layer copies are kept, and compared with the
    tensors when they are read, byte by byte: if anything differs, the copies count, and copies are
    kept for good. Later the version and the address of each tensor tell, which cost nothing; they
    do not tell of writes through `.data` or pointers that begin later.

    Args:
        param: full name of a parameter of the layer.
        numel: of its weight. Where the tensors have more than twice as many elements, they are
            not copied before somebody has been seen to write to some layer's.
        alarm: of the model.
    """

    def __init__(self, param: str, numel: int, alarm: Alarm) -> None:
        self._param, self._most = param, max(2 * numel, _FEW)
        self._alarm, self._heard = alarm, alarm.count
        self.copies = False
        self._task, self._left = NO_TASK, _WATCHED

    def keep(self, tensors: Sequence[Tensor]) -> Kept:
        """Takes tensors as they are now."""
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
        """Tensors of which there is no copy have changed: there will be from now on."""
        self.copies = True
        self._alarm.count += 1
        return OverwrittenError(self._param)

    def _count_backward(self) -> None:
        task = current_task()
        if task != self._task:
            self._task = task
            self._left -= 1


class Kept:
    """Tensors as they were in the backward of their layer.

    Args:
        keeper: of the layer.
        tensors: as autograd has them.
        copies: of these, where they are compared.
    """

    __slots__ = ("_copies", "_keeper", "_marks", "_tensors")

    def __init__(
        self, keeper: Keeper, tensors: Sequence[Tensor], copies: Sequence[Tensor] | None
    ) -> None:
        self._keeper, self._tensors, self._copies = keeper, tensors, copies
        self._marks = _marks(tensors)

    def __call__(self) -> Sequence[Tensor]:
        """The tensors, with the values that they had.

        Raises:
            OverwrittenError: they have been written to or freed, and there are no copies.
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
        """The rows of one use of a layer, whose activations and delta these are.

        Raises:
            OverwrittenError: as above.
        """
        return rule.factors(module, slot, Call(*self()))


def _marks(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Versions and addresses; of the two tensors of a product without a loop, for every layer."""
    if len(tensors) == 2:
        a, d = tensors
        return a._version, d._version, a.data_ptr(), d.data_ptr()
    return *(t._version for t in tensors), *(t.data_ptr() for t in tensors)


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def _is_same(t: Tensor, copy: Tensor) -> bool:
    """Whether all values are, NaN too."""
    if torch.equal(t, copy):
        return True
    return bool(((t == copy) | ((t != t) & (copy != copy))).all())
