"""Which modules of an `nn.Sequential` make a chain."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from outergrad.replay.from_output import is_known
from outergrad.replay.layer import is_layer


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody looks at what it computes."""
    return any(value for key, value in vars(module).items() if key.endswith("_hooks"))


def chains_in(modules: Sequence[nn.Module | None]) -> list[tuple[int, int]]:
    """First and last index of the layers of every chain of two and more, as long as they get."""
    chains: list[tuple[int, int]] = []
    first = last = None
    for i, module in enumerate([*modules, None]):
        if module is not None and is_layer(module):
            first, last = (i if first is None else first), i
        elif module is None or not _may_stand_between(module):
            if first is not None and last is not None and last > first:
                chains.append((first, last))
            first = last = None
    return chains


_BETWEEN = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.PReLU),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.Softmax, nn.LogSoftmax, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink),
)
"""Computed again where they stand between two layers."""


def _may_stand_between(module: nn.Module) -> bool:
    return is_known(module) or type(module) in _BETWEEN


def keeps_rows_apart(module: nn.Module) -> bool:
    """Whether, of what may stand between layers, it never looks across the first dimension."""
    if isinstance(module, nn.Softmax | nn.LogSoftmax):
        return False  # which dimension is meant depends on how many there are
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return len(module.normalized_shape) == 1
    if isinstance(module, nn.Flatten):
        return module.start_dim > 0
    return not isinstance(module, nn.Unflatten) or (isinstance(module.dim, int) and module.dim > 0)
