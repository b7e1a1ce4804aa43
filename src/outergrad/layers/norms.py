"""Norms that scale each sample by itself, in one kernel.

Where a transform tells samples apart, the norm is computed as always, and the gradient of each
sample follows from its input and delta: of the bias the sum of the deltas, of the weight that of
the deltas times what was normalised. So nothing is kept besides what autograd keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from outergrad.core.protocols import TapFn
from outergrad.core.types import Call, Factors
from outergrad.layers._common import samples_of
from outergrad.layers.bare import BareRule, read_as
from outergrad.linalg.outer import widened

NORMALISED: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    nn.LayerNorm: lambda m, x: F.layer_norm(x, m.normalized_shape, eps=m.eps),
    nn.RMSNorm: lambda m, x: F.rms_norm(x, m.normalized_shape, eps=m.eps),
    nn.GroupNorm: lambda m, x: F.group_norm(x, m.num_groups, eps=m.eps),
}
"""What the weight of a norm multiplies, by type."""


class NormRule(BareRule):
    """Rule of one norm whose input has samples first; any other input is that of a `BareRule`.

    Args:
        module: a module of a type in `NORMALISED`, before its class is swapped.
        names: attribute names of the trained parameters.
    """

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        super().__init__(module, names, None)
        self._normalised = NORMALISED[type(module)]

    def forward(self, module: nn.Module, tap: TapFn, *args: Any, **kwargs: Any) -> Any:
        """Computes the module's forward, with a tap on its output per parameter."""
        x = args[0] if len(args) == 1 and not kwargs else None
        if x is None or not self._has_samples_first(module, x, samples_of(tap) or 0):
            return super().forward(module, tap, *args, **kwargs)
        with read_as(module, {name: getattr(module, name).detach() for name in self._names}):
            y = self._plain(module, x)
        for slot, name in enumerate(self._names):
            a = x if name == "weight" else x.new_ones(len(x), requires_grad=False)
            y = tap(y, a, slot, rows=len(x), samples=len(x))
        return y

    def _has_samples_first(self, module: Any, x: Any, samples: int) -> bool:
        """True of a plain tensor with a first dimension of samples, which is not normalised."""
        own = 1 if isinstance(module, nn.GroupNorm) else len(module.normalized_shape)
        return type(x) is Tensor and samples > 0 and x.dim() > own and len(x) == samples

    def factors(self, module: nn.Module, slot: int, call: Call) -> Factors:
        """Returns a row per sample: its gradient, and an activation of one."""
        sums_BO = self._sums(module, slot, call).to(call.d.dtype)
        return Factors(sums_BO.unsqueeze(0), sums_BO.new_ones(1, len(sums_BO), 1))

    def products(self, module: nn.Module, slot: int, call: Call) -> tuple[Tensor, None]:
        """Returns the gradient of each sample, (B, 1, O, 1), and no other."""
        return self._sums(module, slot, call)[:, None, :, None], None

    def _sums(self, module: Any, slot: int, call: Call) -> Tensor:
        """Returns the gradient of each sample, (B, O)."""
        d, samples = widened(call.d), len(call.a)
        if call.a.dim() > 1:  # the input, and not the ones of a bias or of copies
            d = d * self._normalised(module, call.a.to(d.dtype))
        numel = getattr(module, self._names[slot]).numel()
        if not samples:
            return d.new_zeros(0, numel)
        if isinstance(module, nn.GroupNorm):
            return d.reshape(samples, numel, -1).sum(dim=2)
        return d.reshape(samples, -1, numel).sum(dim=1)
