"""Gradients that stay in the buffer in which they were summed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import ref

from torch import Tensor

from outergrad.core.memory import holders
from outergrad.step import param_grad

LARGE = 1 << 14
"""Elements from which to copy a gradient costs more than the calls that are saved by copying."""


class Lending:
    """Makes sums the gradients of a loop, if that leaves gradients as they are.

    To copy a sum into `param.grad` takes a pass over it. It is needed where somebody keeps the
    gradient that autograd formed (`zero_grad(set_to_none=False)`, flat buffers of others), and
    where the loop changes gradients in place (clipping, unscaling), because a sum is kept for a
    step, for sites that lack it. The first sums are copied, to see what becomes of them.
    """

    def __init__(self) -> None:
        self._written: list[_Written] | None = None
        """The gradients of the last step; None before the first."""
        self._large: Mapping[str, Tensor] = {}
        self._lends = self._is_over = False

    def write(self, params: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> None:
        """Copies into `param.grad`; what is lent comes with `lend`.

        Args:
            params: by name.
            sums: parts of a buffer that is not written to as long as somebody holds them.
        """
        large = {} if self._is_over else {n: t for n, t in sums.items() if t.numel() >= LARGE}
        alike = bool(large) and all(_is_like(params[name].grad, t) for name, t in large.items())
        self._is_over = not (alike and all(one.is_left_alone() for one in self._written or ()))
        self._large = {} if self._is_over else large
        self._lends = bool(self._large) and self._written is not None
        copied = {n: t for n, t in sums.items() if n not in large} if self._lends else sums
        param_grad.overwrite(params, copied)

    def lend(self, params: Mapping[str, Tensor]) -> None:
        """The step counts: large sums become `param.grad`."""
        if self._lends:
            param_grad.replace(params, self._large)
        self._written = [_Written.of(params[name]) for name in self._large]


def _is_like(grad: Tensor | None, t: Tensor) -> bool:
    """Whether nobody would notice if a gradient were another tensor of the same values."""
    if type(grad) is not Tensor or grad.requires_grad:
        return False
    return grad.stride() == t.stride() and grad.dtype == t.dtype and holders(grad) == 1


@dataclass
class _Written:
    """A gradient that a loop has got, whose memory it may free.

    Attributes:
        param: whose.
        grad: it, as long as somebody has it.
        counter: an empty tensor with its count of changes.
        version: that count then.
    """

    param: Tensor
    grad: ref[Tensor]
    counter: Tensor
    version: int

    @staticmethod
    def of(param: Tensor) -> _Written:
        """What is in `param.grad` now."""
        grad = param.grad
        assert grad is not None
        counter = grad.detach()
        counter.data = grad.new_empty(0)
        return _Written(param, ref(grad), counter, grad._version)

    def is_left_alone(self) -> bool:
        """Whether it was not changed in place, and a new backward has made another one."""
        return self.counter._version == self.version and self.grad() is not self.param.grad
