"""Parameters that a module's own forward reads: norms, scales, tokens, tables of positions.

Such a parameter has no factors, but its gradient by sample is no larger than what the samples are
computed from. Where a transform tells samples apart, the module's forward reads a copy of it per
sample. The delta of copy b is the gradient of sample b: one row, whose activation is one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from outergrad.capture.copies import Copies, copied
from outergrad.capture.weighting import samples_in
from outergrad.core.protocols import Rule, TapFn
from outergrad.core.transform import SampleRows, Samples
from outergrad.core.types import Call, Factors, Slot
from outergrad.layers._common import join, layer_of, samples_of
from outergrad.linalg.site_gradient import sampled


class BareRule:
    """Rule of one module: its bare parameters are read as copies, and others have a rule.

    Args:
        module: the module, before its class is swapped.
        names: attribute names of the bare parameters.
        inner: the rule of the others, if there is one.
    """

    def __init__(self, module: nn.Module, names: Collection[str], inner: Rule | None) -> None:
        self._names, self._inner, self._plain = tuple(names), inner, type(module).forward
        self._first = 0 if inner is None else len(inner.slots(module, ""))
        self.owns = () if inner is None else inner.owns

    def objection(self, module: nn.Module) -> None:
        """Returns None: `with_bare` has objected before."""

    def slots(self, module: nn.Module, name: str) -> list[Slot]:
        """Returns the slots of the inner rule, and a vector per bare parameter."""
        inner = [] if self._inner is None else self._inner.slots(module, name)
        params = [(join(name, bare), getattr(module, bare)) for bare in self._names]
        return [*inner, *(Slot(name, full, p.numel(), 1, vector=True) for full, p in params)]

    def forward(self, module: nn.Module, tap: TapFn, *args: Any, **kwargs: Any) -> Any:
        """Computes the module's forward, which reads copies.

        Raises:
            RuntimeError: it uses one in a way that `Copies` does not know.
        """
        copies = {name: self._read(module, tap, name) for name in self._names}
        args, kwargs = tree_map_only(Tensor, _computed, (args, kwargs))
        with read_as(module, copies):
            if self._inner is None:
                return self._plain(module, *args, **kwargs)
            return self._inner.forward(module, _InnerTap(tap, self._first), *args, **kwargs)

    def _read(self, module: nn.Module, tap: TapFn, name: str) -> Tensor:
        """Returns the copies of a parameter; the parameter itself where there are no samples."""
        parameter, total = getattr(module, name), samples_of(tap) or 0
        slot = self._first + self._names.index(name)
        ones_B = parameter.new_ones(total, requires_grad=False)
        if not total:
            return tap(parameter.detach().clone(), ones_B, slot, rows=0, samples=0)
        copies_B = tap(copied(parameter, total), ones_B, slot, rows=total, samples=total)
        return Copies(copies_B, join(layer_of(tap), name))

    def rows(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Returns the rows of the inner rule, and the number of samples for each bare parameter."""
        inner = [] if self._inner is None else self._inner.rows(module, args, kwargs)
        samples = samples_in([*args, *kwargs.values()]) or 0
        return [*inner, *[samples] * len(self._names)]

    def factors(self, module: nn.Module, slot: int, call: Call) -> Factors:
        """Returns a row per sample: its gradient, and an activation of one."""
        if slot < self._first:
            assert self._inner is not None
            return self._inner.factors(module, slot, call)
        total = len(call.a)
        d_GNO = call.d.reshape(1, total, -1) if total else call.d.new_zeros(1, 0, call.d.numel())
        return Factors(d_GNO, call.a.to(d_GNO.dtype).reshape(1, total, 1))

    def by_sample(self, module: nn.Module, slot: int, call: Call, samples: Samples) -> SampleRows:
        """Returns the rows of `factors` with the index of each row's sample."""
        if slot < self._first:
            inner: Any = self._inner
            return inner.by_sample(module, slot, call, samples)
        return sampled(self.factors(module, slot, call), samples)


class _InnerTap:
    """The tap of the inner rule, which knows of its own slots alone.

    Args:
        tap: of the layer.
        slots: how many slots the inner rule has.
    """

    def __init__(self, tap: TapFn, slots: int) -> None:
        self._tap, self._slots = tap, slots
        self.samples, self.layer = samples_of(tap), layer_of(tap)

    def __call__(self, y: Tensor, a: Tensor, slot: int = 0, *args: Any, **about: Any) -> Tensor:
        """Implements `TapFn`."""
        return self._tap(y, a, slot % self._slots, *args, **about)


@contextmanager
def read_as(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Inside, attributes of the module are these tensors, before its parameters are looked for."""
    vars(module).update(tensors)
    try:
        yield
    finally:
        for name in tensors:
            vars(module).pop(name, None)


class _Computed(torch.autograd.Function):
    """The identity, whose output autograd counts as computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        """Returns x."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor) -> tuple[None, None]:
        """Returns nothing: nobody asks."""
        return None, None


def _computed(t: Tensor) -> Tensor:
    """Returns an input such that `Copies` can tell what is computed from it."""
    if t.requires_grad or not t.is_floating_point():
        return t
    return _Computed.apply(t, t.new_empty(0, requires_grad=True))  # type: ignore[return-value]
