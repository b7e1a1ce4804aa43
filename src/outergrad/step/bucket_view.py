"""Gradient as bucket view: the sum of an all-reduce becomes the gradient, without a copy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from weakref import ref

from torch import Tensor

from outergrad.buckets.dense import LARGE
from outergrad.core.memory import most_holders
from outergrad.step import param_grad


class BucketView:
    """Makes the sums of a bucket the gradients, if the loop leaves gradients as they are.

    Copying a sum into `param.grad` takes a pass over it. It is needed if somebody keeps the
    gradient that autograd formed (`zero_grad(set_to_none=False)`, flat buffers of others). It is
    also needed if the loop changes gradients in place (clipping, unscaling), because a sum is kept
    for a step, for sites that lack it. The first sums are copied, to see what becomes of them.
    Either all sums of a message become gradients, if one is large, or none.
    """

    def __init__(self) -> None:
        self._names: list[str] | None = None
        """Parameters whose sums may become gradients; empty once the loop would notice."""
        self._copies: list[_Copy] | None = None
        self._copied: Mapping[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        """Sums that will become gradients, as tensors of their own in the same memory."""
        self._one: Tensor | None = None
        """A view of that memory, whose version counts the writes to all of it."""
        self._lent: tuple[Tensor, int] | None = None
        """Such a view for the sums that became gradients, with its version then."""

    def prepare(self, params: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> None:
        """Decides which sums become gradients and which are copied, while they are on their way.

        Args:
            params: parameters by name, whose gradients are complete.
            sums: views of a buffer that is not written to as long as somebody holds them.
        """
        if self._names is None:
            self._names = list(sums) if any(t.numel() >= LARGE for t in sums.values()) else []
        elif not self._was_left_alone():
            self._names.clear()
        if self._names and not _are_like(params, sums):
            self._names.clear()
        if self._names and self._copies is not None:
            self._one = next(iter(sums.values()))
            self._sums, self._copied = {name: t.detach() for name, t in sums.items()}, {}
        else:
            self._sums, self._copied = {}, sums

    def write(self, params: Mapping[str, Tensor]) -> Collection[str]:
        """Copies the sums that do not become gradients into `param.grad`, once they have come.

        Returns:
            The parameters of these sums.
        """
        copied, self._copied = self._copied, {}
        if copied:
            param_grad.overwrite(params, copied)
        return copied.keys()

    def lend(self, params: Mapping[str, Tensor], *, copies: bool = False) -> Collection[str]:
        """Makes sums the gradients where that is possible, once the step counts.

        Args:
            params: as in `prepare`.
            copies: True to copy these, too.

        Returns:
            The parameters of these sums.
        """
        self._lent, sums, self._sums = None, self._sums, {}
        if sums and copies:
            param_grad.overwrite(params, sums)
        elif sums:
            assert self._one is not None
            param_grad.replace(params, sums)
            self._lent, self._copies = (self._one, self._one._version), []
        else:
            self._copies = [_Copy.of(params[name]) for name in self._names or ()]
        return sums.keys()

    def _was_left_alone(self) -> bool:
        lent = self._lent
        same = lent is None or lent[0]._version == lent[1]
        return same and all(one.was_left_alone() for one in self._copies or ())


def _are_like(params: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> bool:
    """True if nobody would notice gradients that are other tensors of the same values."""
    grads = []
    for name, t in sums.items():
        grad = params[name].grad
        if type(grad) is not Tensor or grad.requires_grad or grad.dtype != t.dtype:
            return False
        if grad.stride() != t.stride():
            return False
        grads.append(grad)
    return most_holders(grads) <= 1  # else others share the memory of one


@dataclass
class _Copy:
    """A gradient that a sum was copied into, and whose memory may be freed.

    Attributes:
        param: parameter of the gradient.
        grad: weak reference to the gradient.
        counter: empty tensor that shares its version counter.
        version: version at the time.
    """

    param: Tensor
    grad: ref[Tensor]
    counter: Tensor
    version: int

    @staticmethod
    def of(param: Tensor) -> _Copy:
        """Records the current gradient of a parameter."""
        grad = param.grad
        assert grad is not None
        counter = grad.detach()
        counter.data = grad.new_empty(0)  # keeps the version counter, not the memory
        return _Copy(param, ref(grad), counter, grad._version)

    def was_left_alone(self) -> bool:
        """True if it was not changed in place, and is not `param.grad` any more."""
        return self.counter._version == self.version and self.grad() is not self.param.grad
